"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  // The formats of the same names are in charts.py.
  const formats = {
    number: (v) => (v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e6) ? v.toExponential(3) : String(Number(v.toPrecision(4)))),
    percent: (v) => (100 * v).toFixed(2) + " %",
    count: (v) => (v >= 100 ? Math.round(v).toLocaleString("en") : String(Number(v.toPrecision(3)))),
  };

  function nearest(points, x) {
    let low = 0, high = points.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - points[low - 1][0] < points[low][0] - x ? low - 1 : low;
  }

  function make(parent, name, attributes, text) {
    const element = name === "line" || name === "circle" ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  }

  function attach(figure) {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const svg = figure.querySelector(":scope > svg");
    const cursor = svg.querySelector(".cursor");
    const tip = figure.querySelector(".tip");
    const hidden = new Set();
    let at = null;

    const toX = (x) => data.left + (data.width * x) / data.xMax;
    const scale = data.log ? Math.log10 : (v) => v;
    const toY = (y) => data.top + data.height * (1 - (scale(y) - scale(data.yMin)) / (scale(data.yMax) - scale(data.yMin)));
    const shown = () => data.series.filter((s, n) => !hidden.has(n) && s.points.length);
    const places = () => [...new Set(shown().flatMap((s) => s.points.map((p) => p[0])))].sort((a, b) => a - b);

    function hide() {
      at = null;
      cursor.replaceChildren();
      tip.hidden = true;
    }

    function show(x) {
      const found = shown().map((s) => ({ series: s, point: s.points[nearest(s.points, x)] }));
      if (!found.length) return hide();
      at = found.reduce((a, b) => (Math.abs(b.point[0] - x) < Math.abs(a.point[0] - x) ? b : a)).point[0];
      cursor.replaceChildren();
      tip.replaceChildren();
      make(cursor, "line", { x1: toX(at), x2: toX(at), y1: data.top, y2: data.top + data.height });
      const step = data.stepsPerEpoch ? " · step " + Math.round(at * data.stepsPerEpoch).toLocaleString("en") : "";
      make(tip, "b", {}, data.xName + " " + Number(at.toPrecision(4)) + step);
      for (const { series, point } of found) {
        if (Math.abs(point[0] - at) > 0.03 * data.xMax) continue;
        if (point[1] >= data.yMin && point[1] <= data.yMax) make(cursor, "circle", { cx: toX(point[0]), cy: toY(point[1]), r: 4, class: "c" + series.color });
        const row = make(tip, "div", {});
        make(row, "i", { class: "c" + series.color });
        make(row, "span", {}, series.label);
        make(row, "em", {}, formats[data.format](point[1]));
      }
      tip.hidden = false;
      const box = svg.getBoundingClientRect(), outer = figure.getBoundingClientRect();
      const x0 = box.left - outer.left + (toX(at) * box.width) / svg.viewBox.baseVal.width;
      const right = x0 + 14 + tip.offsetWidth <= outer.width - 4;
      tip.style.left = Math.max(4, right ? x0 + 14 : x0 - 14 - tip.offsetWidth) + "px";
      tip.style.top = box.top - outer.top + 18 + "px";
    }

    function point(event) {
      const box = svg.getBoundingClientRect();
      show((((event.clientX - box.left) * svg.viewBox.baseVal.width) / box.width - data.left) * (data.xMax / data.width));
    }

    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return hide();
      const all = places();
      const last = all.length - 1;
      const now = at === null ? last : all.indexOf(at);
      const move = { ArrowLeft: Math.max(0, now - (at !== null)), ArrowRight: Math.min(last, now + (at !== null)), Home: 0, End: last };
      if (!(event.key in move) || last < 0) return;
      event.preventDefault();
      show(all[move[event.key]]);
    });
    for (const button of figure.querySelectorAll(".legend button")) {
      button.addEventListener("click", () => {
        const number = Number(button.dataset.series);
        const off = !hidden.delete(number);
        if (off) hidden.add(number);
        button.setAttribute("aria-pressed", String(!off));
        svg.querySelector('[data-series="' + number + '"]').style.display = off ? "none" : "";
        hide();
      });
    }
  }

  document.querySelectorAll("figure.chart:not(.bars)").forEach(attach);
  for (const button of document.querySelectorAll(".copy")) {
    if (!navigator.clipboard) continue;
    button.hidden = false;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.parentElement.querySelector("code").textContent);
      button.textContent = "copied";
      setTimeout(() => (button.textContent = "copy"), 1500);
    });
  }

  // A click on a column's name sorts its table: names from A, numbers from the lowest, and then the other way round.
  function makeSortable(table) {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    const text = (row, column) => row.cells[column].textContent.trim();
    const value = (row, column) => parseFloat(text(row, column).replace(/[,\s%]/g, ""));
    heads.forEach((head, column) => {
      const button = make(head, "button", { type: "button" }, head.textContent);
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        const numeric = head.classList.contains("num");
        const order = (a, b) => {
          if (!numeric) return sign * text(a, column).localeCompare(text(b, column), "en", { numeric: true });
          const x = value(a, column), y = value(b, column);
          return isNaN(x) || isNaN(y) ? isNaN(x) - isNaN(y) : sign * (x - y);
        };
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
        body.append(...[...body.rows].sort(order));
      });
    });
  }
  document.querySelectorAll("table.sortable").forEach(makeSortable);

  // The tiles of one class, such as the mistakes about it.
  for (const label of document.querySelectorAll("label.filter")) {
    label.hidden = false;
    const select = label.querySelector("select");
    select.addEventListener("change", () => {
      for (const tile of label.nextElementSibling.children) {
        const isShown = !select.value || tile.dataset.class === select.value;
        tile.style.display = isShown ? "" : "none";
      }
    });
  }

  // The page of a running run reloads itself and keeps its place; not while it is being read closely, and not for ever.
  const { reloadS, staleAtS } = document.body.dataset;
  const key = "reconv-report:" + location.pathname;
  const folds = () => [...document.querySelectorAll("details")];
  const fold = (d) => d.querySelector("summary").textContent.split(":")[0];

  function keepPlace() {
    const open = Object.fromEntries(folds().map((d) => [fold(d), d.open]));
    try { sessionStorage.setItem(key, JSON.stringify({ y: scrollY, open })); } catch { /* no storage: the place is lost */ }
  }

  function restorePlace() {
    let place = null;
    try {
      place = JSON.parse(sessionStorage.getItem(key));
      sessionStorage.removeItem(key);
    } catch { /* likewise */ }
    if (!place) return;
    for (const d of folds()) if (fold(d) in place.open) d.open = place.open[fold(d)];
    window.scrollTo(0, place.y);
  }

  function reloadLater() {
    setTimeout(() => {
      if (Date.now() / 1000 > Number(staleAtS)) {
        const note = document.querySelector(".live-note"), badge = document.querySelector(".badge.live");
        note.textContent = note.dataset.stale;
        badge.className = "badge warn";
        badge.textContent = "… not finished";
        return;
      }
      const busy = document.hidden || String(getSelection()) || document.querySelector(".tip:not([hidden])");
      if (busy) return reloadLater();
      keepPlace();
      location.reload();
    }, 1000 * Number(reloadS));
  }

  restorePlace();
  if (reloadS) reloadLater();

  window.addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => (d.open = true)));
})();
