// The playground: images come in, go to the server one by one, and are shown with what it found.

import { RequestError, curlCommand, fetchModels, predict, predictQuery, setToken } from "./api.js";
import { at, found, highlight, make, onImageLoad, percent, showItem, showModel, summary } from "./view.js";

const PARALLEL_REQUESTS = 2;
const MAX_RETRIES = 3;
const LOWEST_SCORE = 0.05; // of what is requested; the slider filters what came

let models = [];
let model = null;
let items = [];
let selected = null;
let isAskingForToken = false;
const view = { mapIndex: null, minScore: 0.3, opacity: 0.8 };

// Models

async function loadModels() {
  try {
    models = await fetchModels();
  } catch (error) {
    if (error.status === 401) return askForToken();
    return showPageError(error.message);
  }
  at("page-error").hidden = true;
  for (const item of items) if (item.failure?.code === "unreachable") predictAgain(item);
  const options = models.map(({ name }) => make("option", { value: name, textContent: name, selected: name === model?.name }));
  at("model").replaceChildren(...options);
  at("model-picker").hidden = models.length < 2;
  const current = models.find(({ name }) => name === model?.name) ?? models[0];
  if (!current.ready) return void setTimeout(loadModels, 1000);
  useModel(current);
}

function useModel(next) {
  const isOther = model?.name !== next.name;
  model = next;
  showModel(model);
  if (!isOther) return run();
  view.minScore = model.task === "multilabel" ? 0.5 : 0.3;
  view.mapIndex = null;
  for (const item of items) predictAgain(item);
  draw();
}

function showPageError(message) {
  at("page-error").replaceChildren(make("p", { textContent: message }), make("button", { type: "button", textContent: "Try again", onclick: loadModels }));
  at("page-error").hidden = false;
}

// Images

function addFiles(files) {
  const images = [...files].filter((file) => file.size > 0 || file.type);
  if (!images.length) return;
  const added = images.map((file) => ({ file, name: file.name || "pasted image", url: URL.createObjectURL(file), retries: 0, version: 0 }));
  items.push(...added);
  for (const item of added) item.thumb = makeThumb(item);
  at("gallery").append(...added.map((item) => item.thumb));
  select(added[0]);
  run();
}

function makeThumb(item) {
  const image = make("img", { src: item.url, alt: "" });
  image.addEventListener("error", () => {
    item.isUnreadable = true; // by the browser; the server may read it
    image.replaceWith(make("div", { className: "no-image" }));
    if (item === selected) draw();
  });
  const thumb = make("div", { className: "thumb", tabIndex: -1, title: item.name }, image, make("p"));
  thumb.setAttribute("role", "option");
  thumb.addEventListener("click", () => select(item, true));
  return thumb;
}

function select(item, isFocused = false) {
  selected = item;
  view.mapIndex = null;
  draw();
  item?.thumb.scrollIntoView({ block: "nearest", inline: "nearest" });
  if (isFocused) item?.thumb.focus();
}

function removeItem(item) {
  const place = items.indexOf(item);
  items.splice(place, 1);
  discard(item);
  select(items[Math.min(place, items.length - 1)] ?? null, true);
  if (!items.length) at("choose").focus();
}

function discard(item) {
  item.version += 1; // what is on its way for it is not shown
  clearTimeout(item.timer);
  URL.revokeObjectURL(item.url);
  item.thumb.remove();
}

// Predictions

function predictAgain(item) {
  item.version += 1;
  clearTimeout(item.timer);
  Object.assign(item, { answer: null, failure: null, isRunning: false, retries: 0 });
  run();
}

function run() {
  if (!model || isAskingForToken) return;
  const waiting = items.filter((item) => !item.answer && !item.failure && !item.isRunning);
  const numRunning = items.filter((item) => item.isRunning).length;
  for (const item of waiting.slice(0, Math.max(0, PARALLEL_REQUESTS - numRunning))) predictItem(item);
}

async function predictItem(item) {
  const { version } = item;
  item.isRunning = true;
  draw();
  try {
    const answer = await predict(item.file, predictQuery(model, models.length === 1, LOWEST_SCORE));
    if (version !== item.version) return;
    item.answer = answer;
    if (answer.step !== undefined && answer.step !== model.step) loadModels(); // a new checkpoint is served
  } catch (error) {
    if (version !== item.version) return;
    fail(item, error instanceof RequestError ? error : new RequestError(0, "page", String(error), null));
  }
  item.isRunning = false;
  draw();
  if (item === selected) announce(item);
  run();
}

function fail(item, error) {
  item.failure = { code: error.code, message: error.message };
  if (error.status === 401) askForToken();
  if (error.code === "unreachable") showPageError("The server cannot be reached. It may have ended, or the network is down.");
  const isBusy = error.status === 429 || error.status === 503;
  if (!isBusy || item.retries >= MAX_RETRIES) return;
  const retries = item.retries + 1;
  const waitS = error.retryAfterS ?? retries;
  item.failure.message = `The server is busy: ${error.message}. Trying again in ${waitS} s.`;
  item.timer = setTimeout(() => {
    predictAgain(item);
    item.retries = retries;
  }, 1000 * waitS);
}

function announce(item) {
  if (item.failure) at("announcer").textContent = `${item.name}: ${item.failure.message}`;
  if (!item.answer) return;
  const listed = found(item, model, view.minScore).slice(0, 5).map((one) => `${one.name} ${percent(one.score)}`);
  at("announcer").textContent = `${item.name}: ${listed.join(", ") || "nothing found"}`;
}

// The page

function draw() {
  at("intake").classList.toggle("small", items.length > 0);
  at("gallery-row").hidden = items.length === 0;
  at("result").hidden = !selected || !model;
  if (!model) return;
  for (const item of items) {
    const caption = summary(item, model, view.minScore);
    item.thumb.lastChild.textContent = caption;
    item.thumb.setAttribute("aria-label", `${item.name}: ${caption}`);
    item.thumb.setAttribute("aria-selected", String(item === selected));
    item.thumb.tabIndex = item === selected ? 0 : -1;
    item.thumb.classList.toggle("failed", Boolean(item.failure));
  }
  if (!selected) return;
  showItem(selected, model, view);
  const query = predictQuery(model, models.length === 1, view.minScore);
  at("curl").textContent = curlCommand(selected.name, selected.file.type, query);
}

function onGalleryKey(event) {
  const place = items.indexOf(selected);
  const moves = { ArrowLeft: place - 1, ArrowUp: place - 1, ArrowRight: place + 1, ArrowDown: place + 1, Home: 0, End: items.length - 1 };
  if (event.key in moves) {
    const next = items[Math.max(0, Math.min(items.length - 1, moves[event.key]))];
    select(next, true);
    announce(next);
  } else if (event.key === "Delete" || event.key === "Backspace") removeItem(selected);
  else return;
  event.preventDefault();
}

function connectIntake() {
  at("choose").addEventListener("click", () => at("files").click());
  at("files").addEventListener("change", () => {
    addFiles(at("files").files);
    at("files").value = ""; // so that the same file can be chosen again
  });
  document.addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    if (files.length) event.preventDefault();
    addFiles(files);
  });
  let depth = 0;
  const showVeil = (change) => {
    depth = change === 0 ? 0 : depth + change;
    at("drop-veil").classList.toggle("shown", depth > 0);
  };
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  document.addEventListener("dragenter", (event) => hasFiles(event) && showVeil(1));
  document.addEventListener("dragleave", (event) => hasFiles(event) && showVeil(-1));
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    showVeil(0);
    addFiles(event.dataTransfer.files);
  });
}

function connectResult() {
  at("gallery").addEventListener("keydown", onGalleryKey);
  at("clear").addEventListener("click", () => {
    items.forEach(discard);
    items = [];
    select(null);
    at("choose").focus();
  });
  at("image").addEventListener("load", onImageLoad);
  at("retry").addEventListener("click", () => predictAgain(selected));
  at("opacity").addEventListener("input", (event) => {
    view.opacity = event.target.value / 100;
    at("map").style.opacity = view.opacity;
  });
  at("min-score").addEventListener("input", (event) => {
    view.minScore = event.target.value / 100;
    draw();
  });
  at("list").addEventListener("click", (event) => {
    const row = event.target.closest("li");
    if (!row || model.task === "detection") return;
    view.mapIndex = Number(row.dataset.index);
    draw();
  });
  const numberOf = (event) => (model?.task === "detection" ? event.target.closest("li, .box")?.dataset.number ?? null : null);
  for (const part of [at("list"), at("boxes")]) {
    part.addEventListener("mouseover", (event) => highlight(numberOf(event)));
    part.addEventListener("mouseleave", () => highlight(null));
  }
  at("list").addEventListener("focusin", (event) => highlight(numberOf(event)));
  at("list").addEventListener("focusout", () => highlight(null));
  at("model").addEventListener("change", (event) => useModel(models.find(({ name }) => name === event.target.value)));
  at("copy-curl").addEventListener("click", copyCurl);
}

async function copyCurl() {
  const button = at("copy-curl");
  try {
    await navigator.clipboard.writeText(at("curl").textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(at("curl")); // no clipboard without https: the user can copy what is selected
    button.textContent = "Selected";
  }
  setTimeout(() => (button.textContent = "Copy as curl"), 1500);
}

// The camera

function connectCamera() {
  const dialog = at("camera-dialog"), video = at("video");
  if (!navigator.mediaDevices) {
    at("camera").disabled = true;
    at("camera").title = "Browsers allow the camera on localhost and over https only.";
  }
  at("camera").addEventListener("click", async () => {
    at("camera-error").hidden = true;
    at("capture").disabled = true;
    dialog.showModal();
    try {
      const stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment", width: { ideal: 1280 } } });
      if (!dialog.open) return stream.getTracks().forEach((track) => track.stop());
      video.srcObject = stream;
    } catch (error) {
      at("camera-error").textContent = error.name === "NotAllowedError" ? "The browser does not allow this page to use the camera." : `There is no picture from the camera (${error.name}).`;
      at("camera-error").hidden = false;
    }
  });
  video.addEventListener("loadeddata", () => {
    at("capture").disabled = false;
    at("capture").focus();
  });
  at("capture").addEventListener("click", () => {
    const canvas = make("canvas", { width: video.videoWidth, height: video.videoHeight });
    canvas.getContext("2d").drawImage(video, 0, 0);
    const name = `photo-${new Date().toTimeString().slice(0, 8).replaceAll(":", "")}.jpg`;
    canvas.toBlob((blob) => addFiles([new File([blob], name, { type: "image/jpeg" })]), "image/jpeg", 0.95);
    dialog.close();
  });
  at("camera-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => {
    video.srcObject?.getTracks().forEach((track) => track.stop());
    video.srcObject = null;
  });
}

// The token

function askForToken() {
  if (isAskingForToken) return;
  isAskingForToken = true;
  at("token").value = at("token-dialog").returnValue = "";
  at("token-dialog").showModal();
}

function connectToken() {
  at("token-form").addEventListener("submit", () => setToken(at("token").value.trim()));
  at("token-close").addEventListener("click", () => at("token-dialog").close());
  at("token-dialog").addEventListener("close", () => {
    isAskingForToken = false;
    if (at("token-dialog").returnValue !== "given") return showPageError("This server needs a token.");
    for (const item of items) if (item.failure?.code === "unauthorized") predictAgain(item);
    loadModels();
  });
}

connectIntake();
connectResult();
connectCamera();
connectToken();
loadModels();
