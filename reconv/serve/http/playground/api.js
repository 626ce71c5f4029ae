// Requests to this server, with its bearer token where it needs one.

const TOKEN = "reconv-token";

/** An error answer of the server, or none at all (status 0). */
export class RequestError extends Error {
  constructor(status, code, message, retryAfterS) {
    super(message);
    Object.assign(this, { status, code, retryAfterS });
  }
}

export const getToken = () => sessionStorage.getItem(TOKEN);
export const setToken = (token) => sessionStorage.setItem(TOKEN, token);

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (getToken()) headers.Authorization = `Bearer ${getToken()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch {
    throw new RequestError(0, "unreachable", "The server cannot be reached.", null);
  }
  let answer = null;
  try {
    answer = await response.json();
  } catch {
    // A proxy may answer with a page of its own.
  }
  if (response.ok && answer !== null) return answer;
  const { code = "unknown", message = `The server answered with status ${response.status}.` } = answer?.error ?? {};
  throw new RequestError(response.status, code, message, Number(response.headers.get("Retry-After")) || null);
}

/** What the server says about its models. */
export async function fetchModels() {
  return (await request("models")).models;
}

/** The query of a prediction; detectors and multi-label models give more than is shown, for the slider. */
export function predictQuery(model, isOnly, minScore) {
  const query = new URLSearchParams();
  if (!isOnly) query.set("model", model.name);
  if (model.task !== "classification") query.set("min_score", String(minScore));
  return query;
}

/** The prediction for an image with its explanation; `round_trip_ms` is the time that the browser waited. */
export async function predict(blob, query) {
  const explained = new URLSearchParams(query);
  explained.set("explain", "true");
  const type = blob.type.startsWith("image/") ? blob.type : "application/octet-stream";
  const startMs = performance.now();
  const answer = await request(`predict?${explained}`, { method: "POST", headers: { "Content-Type": type }, body: blob });
  return { ...answer, round_trip_ms: performance.now() - startMs };
}

/** A prediction without its explanation, for a shell. */
export function curlCommand(fileName, type, query) {
  const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const url = new URL("predict", document.baseURI);
  url.search = query;
  const header = (text) => ["-H", quote(text)];
  return [
    "curl", quote(url.href),
    ...(getToken() ? ["-H", '"Authorization: Bearer $TOKEN"'] : []),
    ...header(`Content-Type: ${type.startsWith("image/") ? type : "application/octet-stream"}`),
    "--data-binary", quote(`@${fileName}`),
  ].join(" ");
}
