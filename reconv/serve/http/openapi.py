"""The API as an OpenAPI document, and that document as a page without scripts."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from reconv.core.version import __version__

Schema = dict[str, Any]


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _object(required: str = "", **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, **({"required": required.split()} if required else {})}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _query(name: str, schema: Schema, description: str) -> Schema:
    return {"name": name, "in": "query", "schema": schema, "description": description}


def _answers(description: str, content: Schema, *errors: int, schema: str = "Error") -> Schema:
    texts = {
        400: "The request or an image cannot be read.",
        401: "The token is missing or wrong.",
        404: "There is no such model.",
        408: "The body did not arrive in time.",
        413: "The body is too large, or has too many images.",
        415: "The content type is not supported.",
        503: "The queue is full, the model is not loaded yet, or the time is up; try again after Retry-After seconds.",
    }
    failures = {str(status): {"description": texts[status], "content": _json(_ref(schema))} for status in errors}
    return {"200": {"description": description, "content": content}, **failures}


_STRING, _INTEGER, _NUMBER, _BOOLEAN = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
_BASE64 = {"type": "string", "contentEncoding": "base64", "description": "An encoded image file."}
_BINARY = {"type": "string", "format": "binary"}
_TENSOR = _object(
    "name shape datatype",
    name=_STRING,
    shape=_array(_INTEGER),
    datatype=_STRING,
    parameters={"type": "object"},
    data={"type": "array", "items": {}},
)
_NAME = {"name": "name", "in": "path", "required": True, "schema": _STRING, "description": "Name of the model."}

SCHEMAS: dict[str, Schema] = {
    "Class": _object("index name score", index=_INTEGER, name=_STRING, score=_NUMBER),
    "Box": _object(
        "index name score box_xyxy",
        index=_INTEGER,
        name=_STRING,
        class_id=_INTEGER,
        score=_NUMBER,
        box_xyxy={**_array(_NUMBER), "description": "Left, top, right, bottom in pixels of the upright image."},
    ),
    "Prediction": {
        **_object(
            "width height",
            classes={**_array(_ref("Class")), "description": "Of a classifier, best score first."},
            unsure={**_BOOLEAN, "description": "Of a calibrated classifier: the set has no class or several."},
            prediction_set={
                **_array(_STRING),
                "description": "Of a calibrated classifier: the classes that are probable enough; it has the right one "
                "as often as the model promises (`coverage` in the metadata of the model).",
            },
            boxes={**_array(_ref("Box")), "description": "Of a detector, best score first."},
            width=_INTEGER,
            height=_INTEGER,
        ),
        "description": "The prediction for one image; width and height are those of the upright image.",
    },
    "Predictions": _object(
        "model predictions timings_ms",
        model=_STRING,
        step={"type": ["integer", "null"], "description": "Training step of the checkpoint."},
        predictions=_array(_ref("Prediction")),
        timings_ms=_object(
            "read queue network total", read=_NUMBER, queue=_NUMBER, network=_NUMBER, explain=_NUMBER, total=_NUMBER
        ),
        input={"type": "string", "description": "With explain: the pixels that the network saw, a PNG as data URL."},
        activation_maps={
            **_array(_object("index name image", index=_INTEGER, name=_STRING, image=_STRING)),
            "description": "With explain, of a classifier: where the network looked for its first five classes, each a "
            "PNG as data URL.",
        },
        activation_map_error={"type": "string", "description": "With explain: why the network has no such maps."},
    ),
    "Model": _object(
        "name ready",
        name=_STRING,
        ready=_BOOLEAN,
        task={"enum": ["classification", "multilabel", "detection"]},
        network=_STRING,
        recipe=_STRING,
        classes=_array(_STRING),
        size=_INTEGER,
        channels=_INTEGER,
        step={"type": ["integer", "null"]},
        weights=_STRING,
        devices=_array(_STRING),
        backend=_STRING,
        precision=_STRING,
        metrics={"type": "object", "additionalProperties": _NUMBER},
        confidence={
            "type": ["object", "null"],
            "description": "Temperature and prediction sets of a calibrated classifier.",
        },
        card=_STRING,
    ),
    "Error": _object("error", error=_object("code message", code=_STRING, message=_STRING)),
    "ProtocolError": _object("error", error=_STRING),
    "InferRequest": _object(
        "inputs", id=_STRING, parameters={"type": "object"}, inputs=_array(_TENSOR), outputs=_array({"type": "object"})
    ),
    "InferResponse": _object(
        "model_name outputs", model_name=_STRING, model_version=_STRING, id=_STRING, outputs=_array(_TENSOR)
    ),
}


def _get(summary: str, responses: Schema, tag: str, *parameters: Schema, is_open: bool = False) -> Schema:
    operation: Schema = {"summary": summary, "tags": [tag], "parameters": list(parameters), "responses": responses}
    return {"get": operation | ({"security": []} if is_open else {})}


def _predict() -> Schema:
    body = {
        "image/*": {"schema": _BINARY},
        "application/octet-stream": {"schema": _BINARY},
        "multipart/form-data": {"schema": {"type": "object", "additionalProperties": _BINARY}},
        "application/json": {
            "schema": {"oneOf": [_object("image", image=_BASE64), _object("images", images=_array(_BASE64))]}
        },
    }
    parameters = [
        _query("model", _STRING, "Name of the model; without it the first."),
        _query("top", {"type": "integer", "minimum": 1}, "The number of classes (5), labels or boxes (all)."),
        _query(
            "min_score",
            {"type": "number", "minimum": 0, "maximum": 1},
            "Detectors and multi-label models: omit boxes (0.3) or labels (0.5) with a lower score.",
        ),
        _query("explain", {"type": "boolean"}, "One image: also what the network saw, and where it looked."),
    ]
    return {
        "post": {
            "summary": "Predict the classes or boxes of one image or several",
            "tags": ["predictions"],
            "parameters": parameters,
            "requestBody": {"required": True, "content": body},
            "responses": _answers(
                "The predictions, in the order of the images.",
                _json(_ref("Predictions")),
                *(400, 401, 404, 408, 413, 415, 503),
            ),
        }
    }


def _infer() -> Schema:
    return {
        "post": {
            "summary": "Output tensors for a batch of images (Open Inference Protocol)",
            "tags": ["open inference protocol"],
            "parameters": [_NAME],
            "requestBody": {"required": True, "content": _json(_ref("InferRequest"))},
            "responses": _answers(
                "The output tensors.",
                _json(_ref("InferResponse")),
                *(400, 401, 404, 408, 413, 503),
                schema="ProtocolError",
            ),
        }
    }


def _paths() -> dict[str, Schema]:
    protocol, operations = "open inference protocol", "operations"
    state = _json({"type": "object"})
    return {
        "/predict": _predict(),
        "/models": _get(
            "The models that are served",
            _answers("The models.", _json(_object("models", models=_array(_ref("Model")))), 401),
            "predictions",
        ),
        "/v2": _get("The server", _answers("Name, version and extensions.", state, 401), protocol),
        "/v2/models/{name}": _get(
            "The inputs and outputs of a model", _answers("Metadata.", state, 401, 404, 503), protocol, _NAME
        ),
        "/v2/models/{name}/ready": _get(
            "Whether a model is loaded and warm", _answers("It is.", state, 401, 404, 503), protocol, _NAME
        ),
        "/v2/models/{name}/infer": _infer(),
        "/health": _get(
            "Whether the server works and all models are loaded and warm",
            _answers("It does.", _json(_object("status", status=_STRING)), 503),
            operations,
            is_open=True,
        ),
        "/v2/health/live": _get(
            "Whether the process works; if not, restart it", _answers("It does.", state, 503), operations, is_open=True
        ),
        "/v2/health/ready": _get(
            "Whether all models are loaded and warm", _answers("They are.", state, 503), operations, is_open=True
        ),
        "/metrics": _get(
            "Metrics for Prometheus", _answers("The metrics.", {"text/plain": {"schema": _STRING}}, 401), operations
        ),
    }


DOCUMENT: Schema = {
    "openapi": "3.1.0",
    "info": {"title": "Reconv", "version": __version__, "description": "Predictions of trained models."},
    "paths": _paths(),
    "components": {
        "schemas": SCHEMAS,
        "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "description": "Only with --token-file."}},
    },
    "security": [{"token": []}],
}


def render_html(document: Mapping[str, Any]) -> str:
    """The document as a page."""
    info = document["info"]
    operations = "".join(
        _operation_html(method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    schemas = "".join(
        f'<section id="{escape(name)}"><h3>{escape(name)}</h3>{_schema_html(schema)}</section>'
        for name, schema in document["components"]["schemas"].items()
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(info["title"])} API</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="stylesheet" href="/static/docs.css"></head><body><main>'
        f"<h1>{escape(info['title'])} API <small>{escape(info['version'])}</small></h1>"
        f'<p>{escape(info["description"])} <a href="/openapi.json">openapi.json</a> · <a href="/">playground</a></p>'
        f"<h2>Endpoints</h2>{operations}<h2>Schemas</h2>{schemas}</main></body></html>"
    )


def _operation_html(method: str, path: str, operation: Mapping[str, Any]) -> str:
    parts = [f"<summary><code><b>{method.upper()}</b> {escape(path)}</code> {escape(operation['summary'])}</summary>"]
    if operation["parameters"]:
        rows = "".join(
            f"<tr><td><code>{escape(p['name'])}</code></td><td>{escape(p['in'])}</td>"
            f"<td>{_schema_html(p['schema'])}</td><td>{escape(p.get('description', ''))}</td></tr>"
            for p in operation["parameters"]
        )
        parts.append(f"<table><tr><th>parameter</th><th>in</th><th>type</th><th></th></tr>{rows}</table>")
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        parts.append(f"<p>body <code>{escape(kind)}</code>: {_schema_html(content['schema'])}</p>")
    rows = "".join(
        f"<tr><td><code>{status}</code></td><td>{escape(response['description'])}</td><td>"
        + " ".join(_schema_html(content["schema"]) for content in response["content"].values())
        + "</td></tr>"
        for status, response in operation["responses"].items()
    )
    parts.append(f"<table><tr><th>status</th><th></th><th>body</th></tr>{rows}</table>")
    return f"<details>{''.join(parts)}</details>"


def _schema_html(schema: Mapping[str, Any]) -> str:
    """A schema in words; objects as lists of their fields."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#{escape(name)}">{escape(name)}</a>'
    if "oneOf" in schema:
        return " or ".join(map(_schema_html, schema["oneOf"]))
    if "enum" in schema:
        return " or ".join(f"<code>{escape(value)}</code>" for value in schema["enum"])
    note = f" <small>{escape(schema['description'])}</small>" if "description" in schema else ""
    kind = schema.get("type", "any")
    text = " or ".join(kind) if isinstance(kind, list) else kind
    if kind == "array":
        return f"list of {_schema_html(schema['items']) or 'any'}{note}"
    if kind == "object" and "properties" in schema:
        fields = "".join(
            f"<li><code>{escape(name)}</code> {_schema_html(field)}</li>"
            for name, field in schema["properties"].items()
        )
        return f"{note}<ul>{fields}</ul>"
    return f"{escape(text)}{note}"
