"use strict";
(() => {
  const data = JSON.parse(document.querySelector("#review-data").textContent);
  const figures = [...document.querySelectorAll(".finding")];
  const classes = new Set(data.classes);
  const memory = "reconv-review-" + data.id;
  let decisions = Object.fromEntries(data.accepted.map((n) => [n, { state: "accepted" }]));
  try { decisions = JSON.parse(localStorage.getItem(memory)) || decisions; } catch { /* no storage, or not ours */ }

  const rowOf = (figure) => data.rows[Number(figure.dataset.n)];
  const labelOf = (n) => (decisions[n] && "label" in decisions[n] ? decisions[n].label : data.rows[n].label);
  const stateOf = (n) => (decisions[n] || {}).state || "";
  function actionOf(n) {
    if (stateOf(n) !== "accepted") return stateOf(n) === "rejected" ? "keep" : "";
    return data.rows[n].kind === "label" ? (labelOf(n) ? "relabel" : "exclude") : data.rows[n].proposed;
  }

  function show(figure) {
    const n = Number(figure.dataset.n), state = stateOf(n);
    if (state) figure.dataset.state = state; else delete figure.dataset.state;
    for (const name of ["accept", "reject"]) {
      figure.querySelector("." + name).setAttribute("aria-pressed", String(state === name + "ed"));
    }
    const input = figure.querySelector("input");
    if (input && decisions[n] && "label" in decisions[n]) input.value = decisions[n].label;
  }

  function count() {
    const states = data.rows.map((row, n) => stateOf(n));
    const accepted = states.filter((state) => state === "accepted").length;
    const rejected = states.filter((state) => state === "rejected").length;
    const text = accepted + " accepted, " + rejected + " rejected, " + (states.length - accepted - rejected) + " to decide";
    document.querySelector(".progress").textContent = text;
    try { localStorage.setItem(memory, JSON.stringify(decisions)); } catch { /* decisions last as long as the page */ }
  }

  function decide(figure, state) {
    const n = figure.dataset.n;
    decisions[n] = Object.assign({}, decisions[n], { state });
    show(figure);
    count();
  }

  function visible() {
    return figures.filter((figure) => figure.offsetParent !== null);
  }

  function move(step) {
    const shown = visible(), at = shown.indexOf(document.activeElement.closest(".finding"));
    const next = shown[at < 0 ? 0 : Math.min(shown.length - 1, Math.max(0, at + step))];
    if (next) next.focus();
  }

  for (const figure of figures) {
    for (const [name, state] of [["accept", "accepted"], ["reject", "rejected"]]) {
      const toggled = () => (stateOf(figure.dataset.n) === state ? "" : state);
      figure.querySelector("." + name).addEventListener("click", () => decide(figure, toggled()));
    }
    const input = figure.querySelector("input");
    if (input) input.addEventListener("change", () => {
      const known = input.value === "" || classes.has(input.value);
      input.setCustomValidity(known ? "" : "no class of the data");
      input.reportValidity();
      if (!known) return;
      decisions[figure.dataset.n] = { state: "accepted", label: input.value };
      show(figure);
      count();
    });
    show(figure);
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, textarea, select")) {
      if (event.key === "Escape" && event.target.matches(".finding input")) event.target.closest(".finding").focus();
      return;
    }
    const figure = document.activeElement.closest(".finding");
    const key = event.key.toLowerCase();
    if (key === "j" || key === "arrowright") { move(1); event.preventDefault(); }
    if (key === "k" || key === "arrowleft") { move(-1); event.preventDefault(); }
    if (!figure) return;
    if (key === "u") decide(figure, "");
    if (key === "a" || key === "r") {
      const shown = visible(), at = shown.indexOf(figure);
      decide(figure, key === "a" ? "accepted" : "rejected");
      const next = shown[at + 1];
      if (next) next.focus();
    }
    if (key === "c" && figure.querySelector("input")) { figure.querySelector("input").focus(); event.preventDefault(); }
  });

  const threshold = document.querySelector("#threshold");
  document.querySelector("#accept-above").addEventListener("click", () => {
    for (const figure of figures) {
      const n = figure.dataset.n, row = rowOf(figure);
      if (!stateOf(n) && data.automatic.includes(row.kind) && Number(row.score) >= Number(threshold.value)) {
        decisions[n] = Object.assign({}, decisions[n], { state: "accepted" });
        show(figure);
      }
    }
    count();
  });
  document.querySelector("#hide-decided").addEventListener("click", (event) => {
    const hides = document.body.classList.toggle("done");
    event.target.setAttribute("aria-pressed", String(hides));
  });

  // Names of files may be any bytes: those that are not UTF-8 are lone surrogates here, and become bytes again.
  function encode(text) {
    const parts = [], encoder = new TextEncoder();
    for (const part of text.split(/([\udc80-\udcff])/u)) {
      const code = part.length === 1 ? part.charCodeAt(0) : 0;
      parts.push(code >= 0xdc80 && code <= 0xdcff ? new Uint8Array([code - 0xdc00]) : encoder.encode(part));
    }
    return parts;
  }

  const quoted = (value) => (/[",\r\n]/.test(value) ? '"' + value.replaceAll('"', '""') + '"' : value);
  document.querySelector(".download").addEventListener("click", () => {
    const lines = data.rows.map((row, n) => {
      const decided = Object.assign({}, row, { action: actionOf(n), label: labelOf(n) });
      return data.columns.map((name) => quoted(decided[name])).join(",");
    });
    const parts = encode([data.columns.join(","), ...lines, ""].join("\n"));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob(parts, { type: "text/csv" }));
    link.download = "corrections.csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  count();
})();
