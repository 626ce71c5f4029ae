// Draws a model and a prediction. State is in page.js.

const GOLDEN = 0.618034; // of the color wheel, as in reconv/data/inspect/draw_boxes.py

export const at = (id) => document.getElementById(id);
export const percent = (score) => (score < 5e-4 ? "< 0.1 %" : `${(100 * score).toFixed(1)} %`);
const milliseconds = (ms) => `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;

/** An element with properties and children. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** The color of a class, as in saved images, and black or white for the text on it. */
function classColor(index) {
  const hue = 6 * ((index * GOLDEN) % 1);
  const channel = (shift) => {
    const k = (shift + hue) % 6;
    return Math.round(255 * 0.85 * (1 - 0.85 * Math.max(0, Math.min(k, 4 - k, 1))));
  };
  const [red, green, blue] = [channel(5), channel(3), channel(1)];
  const isLight = 0.299 * red + 0.587 * green + 0.114 * blue > 140;
  return { color: `rgb(${red} ${green} ${blue})`, onColor: isLight ? "#000" : "#fff" };
}

function paint(element, index) {
  const { color, onColor } = classColor(index);
  element.style.setProperty("--color", color);
  element.style.setProperty("--on-color", onColor);
}

// The model

const MAX_CARDS = 4;
// The names of reconv/logging/formatting.py, the main ones first.
const METRICS = {
  top1: "top-1", top5: "top-5", map: "mAP", micro_f1: "micro F1", macro_f1: "macro F1", voc10: "VOC mAP", ap: "AP", ap50: "AP50", ap75: "AP75",
  ap_small: "AP small", ap_medium: "AP medium", ap_large: "AP large", ar1: "AR1", ar10: "AR10", ar100: "AR100",
  ar_small: "AR small", ar_medium: "AR medium", ar_large: "AR large", voc07: "VOC07 mAP",
};
const TASKS = { classification: "classifier", multilabel: "multi-label classifier", detection: "detector" };

function modelFacts(model) {
  const facts = [["task", TASKS[model.task] ?? model.task], ["network", model.network], ["classes", model.classes.length.toLocaleString("en")]];
  facts.push(["input", `${model.size} × ${model.size}${model.channels === 1 ? " gray" : ""}`]);
  facts.push(["runs on", [model.devices?.join(", "), model.backend, model.precision].filter(Boolean).join(" · ")]);
  return facts.filter(([, value]) => value !== undefined && value !== "");
}

/** The header and the model card. */
export function showModel(model) {
  document.title = `${model.name} – Reconv playground`;
  at("model-name").textContent = model.name;
  at("model-facts").replaceChildren(...modelFacts(model).map(([name, value]) => make("li", {}, make("span", { textContent: name }), value)));
  const metrics = metricFacts(model.metrics ?? {});
  const pairs = [...modelFacts(model), ["weights", model.weights], ["step", model.step?.toLocaleString("en")], ...metrics.slice(MAX_CARDS)];
  const rows = pairs.filter(([, value]) => value !== undefined && value !== null);
  at("model-card").replaceChildren(...rows.flatMap(([name, value]) => [make("dt", { textContent: name }), make("dd", { textContent: value })]));
  at("metrics").replaceChildren(...metrics.slice(0, MAX_CARDS).map(([name, value]) =>
    make("div", { className: "card" }, make("p", { textContent: name }), make("p", { textContent: value }))));
  at("card-text").textContent = model.card ?? "";
  at("classes-title").textContent = `${model.classes.length.toLocaleString("en")} classes`;
  at("classes").replaceChildren(...model.classes.map((name) => make("li", { textContent: name })));
  at("about-model").hidden = false;
}

/** The metrics by the names that people use, the main ones first. */
function metricFacts(metrics) {
  const known = Object.keys(METRICS).filter((name) => name in metrics);
  const others = Object.keys(metrics).filter((name) => !(name in METRICS));
  return [...known, ...others].map((name) => {
    const isLoss = name === "loss" || name.endsWith("_loss");
    return [METRICS[name] ?? name, isLoss ? String(Number(metrics[name].toPrecision(4))) : `${(100 * metrics[name]).toFixed(2)} %`];
  });
}

// A prediction

/** What is found in an image: its classes or boxes with at least the minimum score. */
export function found(item, model, minScore) {
  const prediction = item.answer?.predictions[0];
  const all = prediction?.boxes ?? prediction?.classes ?? [];
  return model.task === "classification" ? all : all.filter((one) => one.score >= minScore);
}

/** One line about an image, for its thumbnail and for screen readers. */
export function summary(item, model, minScore) {
  if (item.failure) return item.failure.code === "unauthorized" ? "token needed" : "failed";
  if (!item.answer) return item.isRunning ? "…" : "waiting";
  const best = found(item, model, minScore);
  if (!best.length) return "nothing found";
  if (item.answer.predictions[0].unsure) return `${best[0].name}? ${Math.round(100 * best[0].score)} %`;
  if (model.task === "detection" && best.length > 1) return `${best.length} objects: ${best[0].name}`;
  return `${best[0].name} ${Math.round(100 * best[0].score)} %`;
}

/** The whole result of one image. */
export function showItem(item, model, view) {
  const isDetector = model.task === "detection";
  at("result").classList.toggle("boxed", isDetector);
  at("image-name").textContent = item.name;
  showImage(item);
  const items = found(item, model, view.minScore);
  showBoxes(isDetector ? items : [], item);
  showInput(item, model, view, items);
  showList(item, model, view, items);
  showTimings(item.answer);
}

function showImage(item) {
  const image = at("image");
  const source = item.isUnreadable ? item.answer?.input ?? "" : item.url;
  if (image.getAttribute("src") !== source) source ? image.setAttribute("src", source) : image.removeAttribute("src");
  image.alt = item.name;
  const { width, height } = item.answer?.predictions[0] ?? {};
  at("image-size").textContent = width ? `${width} × ${height}` : "";
  if (width) at("image-frame").style.setProperty("--ratio", width / height);
  image.classList.toggle("crisp", Boolean(width) && Math.max(width, height) < 160);
}

/** The frame has the shape of its image, so that boxes are placed in fractions of it. */
export function onImageLoad({ target: { naturalWidth, naturalHeight } }) {
  at("image-frame").style.setProperty("--ratio", naturalWidth / naturalHeight);
}

function showBoxes(boxes, item) {
  const { width, height } = item.answer?.predictions[0] ?? { width: 1, height: 1 };
  const share = (value, of) => `${(100 * value) / of}%`;
  const place = (element, box, number) => {
    const [left, top, right, bottom] = box.box_xyxy;
    paint(element, box.index);
    element.dataset.number = number;
    Object.assign(element.style, { left: share(left, width), top: share(top, height), width: share(right - left, width), height: share(bottom - top, height) });
    return element;
  };
  const area = ({ box_xyxy: [left, top, right, bottom] }) => (right - left) * (bottom - top);
  const frames = boxes.map((box, number) => [box, place(make("div", { className: "box" }), box, number)]);
  frames.sort(([a], [b]) => area(b) - area(a)); // small boxes on large ones: each can be reached with the mouse
  const labels = boxes.map((box, number) => {
    const label = place(make("div", { className: "label" }, make("span", { textContent: `${box.name} ${Math.round(100 * box.score)} %` })), box, number);
    label.classList.toggle("inside", box.box_xyxy[1] < 0.06 * height);
    label.classList.toggle("at-right", box.box_xyxy[0] > 0.6 * width);
    return label;
  });
  at("boxes").replaceChildren(...frames.map(([, element]) => element), ...labels.reverse()); // the best label on top
  at("boxes").classList.remove("has-active");
}

/** Highlight a box and its row in the list; null: none. */
export function highlight(number) {
  at("boxes").classList.toggle("has-active", number !== null);
  for (const element of document.querySelectorAll(".box, .label, #list li")) {
    element.classList.toggle("active", number !== null && element.dataset.number === String(number));
  }
}

function showInput(item, model, view, items) {
  const { input, activation_maps: maps = [], activation_map_error: error } = item.answer ?? {};
  at("input-panel").hidden = !input;
  if (!input) return;
  at("input").src = input;
  at("input-size").textContent = `${model.size} × ${model.size}`;
  at("input").classList.toggle("crisp", model.size < 160);
  const map = maps.find((one) => one.index === view.mapIndex) ?? maps.find((one) => one.index === items[0]?.index);
  at("map").hidden = at("map-controls").hidden = !map;
  if (map) {
    at("map").src = map.image;
    at("map").style.opacity = view.opacity;
    at("map-class").textContent = map.name;
  }
  at("map-hint").textContent = error ?? "";
  at("map-hint").hidden = !error;
}

function showList(item, model, view, items) {
  const isDetector = model.task === "detection";
  at("list-title").textContent = isDetector && item.answer ? `${items.length} ${items.length === 1 ? "object" : "objects"}` : "Prediction";
  at("min-score-controls").hidden = model.task === "classification" || !item.answer;
  at("min-score").value = Math.round(100 * view.minScore);
  at("min-score-value").textContent = `${Math.round(100 * view.minScore)} %`;
  at("failure").hidden = !item.failure;
  at("failure-text").textContent = item.failure?.message ?? "";
  at("working").hidden = Boolean(item.answer || item.failure);
  at("working-text").textContent = item.isRunning ? "Predicting…" : "Waiting for the images before it…";
  const hasMaps = Boolean(item.answer?.activation_maps?.length);
  const mapIndex = item.answer?.activation_maps?.some((map) => map.index === view.mapIndex) ? view.mapIndex : items[0]?.index;
  // Rows are kept where they can be, so that the focus stays.
  const list = at("list");
  while (list.children.length > items.length) list.lastChild.remove();
  while (list.children.length < items.length) list.append(listRow());
  items.forEach((one, number) => fillRow(list.children[number], one, number, isDetector, hasMaps ? one.index === mapIndex : null));
  const isEmpty = Boolean(item.answer) && !items.length;
  showUnsure(item.answer?.predictions[0], model);
  at("list-hint").hidden = !isEmpty && !hasMaps;
  at("list-hint").textContent = isEmpty ? "Nothing has at least this score." : "Select a class to see where the network looked for it.";
}

/** What a calibrated classifier knows of its own prediction. */
function showUnsure(prediction, model) {
  at("unsure").hidden = !prediction?.unsure;
  if (!prediction?.unsure) return;
  const names = prediction.prediction_set, share = percent(model.confidence?.coverage ?? 0);
  at("unsure").textContent = names.length
    ? `Unsure: ${names.join(", ")}. One of these is right for ${share} of such images.`
    : "Unsure: no class is probable enough. The image may be unlike those the model knows.";
}

function listRow() {
  const name = make("span", { className: "name" }, make("span", { className: "swatch" }), make("span"));
  const bar = make("span", { className: "bar" }, make("i"));
  return make("li", {}, make("button", { type: "button" }, name, make("span", { className: "score" }), bar));
}

function fillRow(row, one, number, isDetector, isPressed) {
  row.dataset.number = number;
  row.dataset.index = one.index;
  const button = row.firstChild;
  button.querySelector(".name > :last-child").textContent = one.name;
  button.querySelector(".swatch").hidden = !isDetector;
  button.querySelector(".score").textContent = percent(one.score);
  button.querySelector("i").style.width = `${100 * one.score}%`;
  isPressed === null ? button.removeAttribute("aria-pressed") : button.setAttribute("aria-pressed", String(isPressed));
  isDetector ? paint(row, one.index) : row.style.removeProperty("--color");
}

function showTimings(answer) {
  at("time-panel").hidden = !answer;
  if (!answer) return;
  const { read, queue, network, explain, total } = answer.timings_ms;
  const stages = [["read", read], ["queue", queue], ["network", network], ["explain", explain], ["transfer", Math.max(0, answer.round_trip_ms - read - queue - network - explain)]];
  at("stages").replaceChildren(...stages.map(([, ms], number) => {
    const part = make("i", { className: `c${number}` });
    part.style.flexGrow = Math.max(ms, 1e-3);
    return part;
  }));
  const entry = (name, ms, className) => make("div", { className }, make("dt", { textContent: name }), make("dd", { textContent: milliseconds(ms) }));
  const names = stages.map(([name, ms], number) => entry(name, ms, `c${number}`));
  at("stage-names").replaceChildren(...names, entry("server total", total, "sum"), entry("round trip", answer.round_trip_ms, "sum"));
}
