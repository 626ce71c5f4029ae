"""The routes of the server.

Nothing that a client sends is used as a path, a URL or a label of a metric (tests/serve/test_server_limits.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from reconv.serve.fairness import FairTurns
from reconv.serve.http import openapi, protocol, static_files
from reconv.serve.http.access import Access
from reconv.serve.http.request_images import split_body, too_many_images
from reconv.serve.limits import MIB, ApiError
from reconv.serve.metrics import CONTENT_TYPE
from reconv.serve.models import LoadedModel, PredictOptions, ServedModel, describe_model
from reconv.serve.reader_pool import give_memory_back
from reconv.serve.serving import RequestTimes, Serving

_log = logging.getLogger("reconv.serve")
Endpoint = Callable[[Request], Awaitable[Response]]
_PREDICT_PARAMETERS = {"model", "top", "min_score", "explain"}


class Routes:
    """The endpoints, as methods that share the models."""

    def __init__(self, serving: Serving, client_of: Callable[[Request], str]) -> None:
        self.serving, self.client_of = serving, client_of
        self.files = static_files.load()
        self._docs = openapi.render_html(openapi.DOCUMENT)

    async def predict(self, request: Request) -> Response:
        """POST /predict: the predictions for one image or several."""
        began_s = time.perf_counter()
        options = predict_options(request)
        served = self.serving.find_model(request.query_params.get("model"))
        with self._in_use(served) as loaded:
            if options.min_score is not None and loaded.predictor.recipe.task == "classification":
                message = "min_score is for detectors and multi-label models; this model gives one class per image"
                raise ApiError(400, "bad_parameter", message)
            client = self.client_of(request)
            self.serving.check_room(loaded, client)
            is_json = request.headers.get("content-type", "").startswith("application/json")
            async with self._body(request, client, is_json) as (body, body_s):
                images = await self._split(request, client, body)
                del body
                if options.explain and len(images) > 1:
                    raise ApiError(400, "bad_parameter", "explain=true is for one image at a time")
                predictions, times = await self.serving.predict(request, loaded, images, options, client)
            step = loaded.predictor.step
        total_s = time.perf_counter() - began_s
        explanation = predictions[0].pop("explanation") if options.explain else {}
        times.network_s -= (explain_s := explanation.pop("seconds", 0.0))
        self._observe(served.name, times, body=body_s, total=total_s)
        answer: dict[str, Any] = {"model": served.name, "step": step, "predictions": predictions, **explanation}
        explain = {"explain": explain_s} if explanation else {}
        stages = {"read": times.read_s, "queue": times.queue_s, "network": times.network_s, **explain, "total": total_s}
        answer["timings_ms"] = {stage: round(1000 * seconds, 3) for stage, seconds in stages.items()}
        return JSONResponse(answer)

    @asynccontextmanager
    async def _body(self, request: Request, client: str, is_json: bool) -> AsyncIterator[tuple[bytearray, float]]:
        """The body of a request, counted until its end, and how long it took to arrive."""
        limits, began_s = self.serving.limits, time.perf_counter()
        limit = min(limits.max_body_bytes, limits.max_json_bytes) if is_json else limits.max_body_bytes
        body = await self.serving.bodies.read(request, client, limit)
        num_bytes, held = len(body), [body]
        del body  # else it would stay in memory beside its images
        try:
            yield held.pop(), time.perf_counter() - began_s
        finally:
            self.serving.bodies.release(client, num_bytes)
            if is_json and num_bytes > MIB:
                self.serving.large.submit("", give_memory_back)

    async def _split(self, request: Request, client: str, body: bytearray) -> list[bytes]:
        """The encoded images of a body."""
        limits, kind = self.serving.limits, request.headers.get("content-type", "")
        if kind.startswith(("application/json", "multipart/")):  # may take a while
            images = await self.serving.readers.call(client, split_body, kind, body, limits)
        else:
            images = split_body(kind, body, limits)
        if len(images) > limits.max_images:
            raise too_many_images(limits.max_images)
        return images

    async def models(self, request: Request) -> Response:
        """GET /models: what is served."""
        return JSONResponse({"models": [describe_model(model) for model in self.serving.models.values()]})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: for Prometheus."""
        self.serving.sample_metrics()
        return Response(self.serving.metrics.to_text(), media_type=CONTENT_TYPE)

    async def page(self, request: Request) -> Response:
        """GET /: the playground."""
        file = self.files.get("page.html")
        return RedirectResponse("/docs") if file is None else static_files.respond(request, file)

    async def docs(self, request: Request) -> Response:
        """GET /docs: the API for people."""
        return Response(self._docs, media_type="text/html; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json: the API for programs."""
        return JSONResponse(openapi.DOCUMENT)

    async def static(self, request: Request) -> Response:
        """GET /static/NAME: a file of a page, by its exact name."""
        file = self.files.get(request.path_params["name"])
        if file is None:
            raise ApiError(404, "not_found", "there is no such file")
        return static_files.respond(request, file)

    async def server_metadata(self, request: Request) -> Response:
        """GET /v2: the server."""
        return JSONResponse(protocol.SERVER_METADATA)

    async def model_metadata(self, request: Request) -> Response:
        """GET /v2/models/NAME: the inputs and outputs of a model."""
        served = self.serving.find_model(request.path_params["name"])
        with self._in_use(served, request.path_params.get("version")) as loaded:
            return JSONResponse(protocol.model_metadata(served.name, loaded.predictor))

    async def model_ready(self, request: Request) -> Response:
        """GET /v2/models/NAME/ready: whether a model is loaded and warm."""
        served = self.serving.find_model(request.path_params["name"])
        is_ready = served.current is not None and not self.serving.is_draining
        if is_ready and "version" in request.path_params:
            with self._in_use(served, request.path_params["version"]):
                pass
        return JSONResponse({"name": served.name, "ready": is_ready}, 200 if is_ready else 503)

    async def infer(self, request: Request) -> Response:
        """POST /v2/models/NAME/infer: the output tensors for a batch of images."""
        served = self.serving.find_model(request.path_params["name"])
        with self._in_use(served, request.path_params.get("version")) as loaded:
            client, predictor = self.client_of(request), loaded.predictor
            self.serving.check_room(loaded, client)
            header_length = request.headers.get(protocol.HEADER_LENGTH)
            async with self._body(request, client, is_json=header_length is None) as (body, _):
                asked = await self.serving.readers.call(
                    client, protocol.parse_infer, bytes(body), header_length, predictor, self.serving.limits
                )
                del body
                options = PredictOptions(min_score=asked.min_score, is_raw=True)
                results, times = await self.serving.predict(request, loaded, asked.images, options, client)
            self._observe(served.name, times)
            tensors = protocol.output_tensors(results, predictor)
            return protocol.infer_response(served.name, protocol.version_of(predictor), asked, tensors)

    @contextmanager
    def _in_use(self, served: ServedModel, version: str | None = None) -> Iterator[LoadedModel]:
        """The current checkpoint of a model, which stays loaded meanwhile."""
        loaded = self.serving.acquire(served)
        try:
            if version is not None and version != (current := protocol.version_of(loaded.predictor)):
                raise ApiError(404, "no_such_version", f"the model {served.name!r} has the version {current} only")
            yield loaded
        finally:
            loaded.release()

    def _observe(self, name: str, times: RequestTimes, **more_s: float) -> None:
        """Add the times of a request to the metrics."""
        stages = {"read": times.read_s, "queue": times.queue_s, "network": times.network_s, **more_s}
        self.serving.metrics.observe(name, stages)

    async def health(self, request: Request) -> Response:
        """GET /health: whether the server works and is ready, as other servers call it."""
        is_healthy = self.serving.is_healthy and self.serving.is_ready
        return JSONResponse({"status": "ok" if is_healthy else "not ready"}, 200 if is_healthy else 503)

    async def live(self, request: Request) -> Response:
        """GET /v2/health/live: whether the process works; if not, it should be restarted."""
        is_live = self.serving.is_healthy
        return JSONResponse({"live": is_live}, 200 if is_live else 503)

    async def ready(self, request: Request) -> Response:
        """GET /v2/health/ready: whether every model is loaded and warm."""
        is_ready = self.serving.is_ready
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)


def build_app(serving: Serving, access: Access) -> Starlette:
    """The ASGI application."""
    routes, turns = Routes(serving, access.client_of), FairTurns()
    table: list[tuple[str, str, Endpoint]] = [
        ("POST", "/predict", routes.predict),
        ("GET", "/models", routes.models),
        ("GET", "/metrics", routes.metrics),
        ("GET", "/", routes.page),
        ("GET", "/static/{name}", routes.static),
        ("GET", "/docs", routes.docs),
        ("GET", "/openapi.json", routes.openapi),
        ("GET", "/health", routes.health),
        ("GET", "/v2", routes.server_metadata),
        ("GET", "/v2/models/{name}", routes.model_metadata),
        ("GET", "/v2/models/{name}/ready", routes.model_ready),
        ("POST", "/v2/models/{name}/infer", routes.infer),
        ("GET", "/v2/models/{name}/versions/{version}", routes.model_metadata),
        ("GET", "/v2/models/{name}/versions/{version}/ready", routes.model_ready),
        ("POST", "/v2/models/{name}/versions/{version}/infer", routes.infer),
        ("GET", "/v2/health/live", routes.live),
        ("GET", "/v2/health/ready", routes.ready),
    ]
    endpoints = [
        Route(path, _answer(endpoint, path, serving, access, turns), methods=[method])
        for method, path, endpoint in table
    ]

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "bad_request")
        serving.metrics.count("other", error.status_code)
        return error_response(request, ApiError(error.status_code, code, error.detail, dict(error.headers or {})))

    return Starlette(routes=endpoints, exception_handlers={HTTPException: http_error})


def _answer(endpoint: Endpoint, path: str, serving: Serving, access: Access, turns: FairTurns) -> Endpoint:
    """An endpoint with access control, errors as JSON, and metrics."""
    metrics = serving.metrics

    async def respond(request: Request) -> Response:
        metrics.in_flight.inc()
        try:
            response = await _respond(endpoint, path, request, serving, access, turns)
        finally:
            metrics.in_flight.dec()
        metrics.count(path, response.status_code)
        return response

    return respond


async def _respond(
    endpoint: Endpoint, path: str, request: Request, serving: Serving, access: Access, turns: FairTurns
) -> Response:
    try:
        access.check(request, path)
        if request.method == "POST":  # probes and pages do not wait
            await turns.take(access.client_of(request))
        return await endpoint(request)
    except ClientDisconnect:
        return Response(status_code=499)  # it is counted; the client has gone
    except ApiError as error:
        if error.status in (413, 408, 429, 503):
            serving.metrics.rejected.labels(error.code).inc()
        if not await serving.bodies.discard(request):
            error.headers["Connection"] = "close"
        return error_response(request, error)
    except asyncio.CancelledError:
        if not serving.is_draining:
            raise
        return error_response(request, ApiError(503, "stopping", "the server has stopped before the request ended"))
    except Exception:
        _log.exception("%s %s failed", request.method, path)
        return error_response(request, ApiError(500, "internal", "the prediction failed; see the server's log"))


def error_response(request: Request, error: ApiError) -> Response:
    """An error as JSON: of the Open Inference Protocol a string, elsewhere a code and a message."""
    is_protocol = request.url.path.startswith("/v2")
    content: Any = error.message if is_protocol else {"code": error.code, "message": error.message}
    return Response(json.dumps({"error": content}), error.status, error.headers, "application/json")


def predict_options(request: Request) -> PredictOptions:
    """The query parameters of /predict."""
    query = request.query_params
    unknown = sorted(set(query) - _PREDICT_PARAMETERS)
    if unknown:
        known = ", ".join(sorted(_PREDICT_PARAMETERS))
        raise ApiError(400, "bad_parameter", f"there is no query parameter {unknown[0]!r}; there are: {known}")
    try:
        top = int(query["top"]) if "top" in query else None
        min_score = float(query["min_score"]) if "min_score" in query else None
    except ValueError as error:
        raise ApiError(400, "bad_parameter", f"top is an integer, min_score a number: {error}") from error
    if (top is not None and top < 1) or (min_score is not None and not 0 <= min_score <= 1):
        raise ApiError(400, "bad_parameter", "top is at least 1, and min_score from 0 to 1")
    if query.get("explain", "false") not in ("true", "false"):
        raise ApiError(400, "bad_parameter", "explain is true or false")
    return PredictOptions(top, min_score, query.get("explain") == "true")
