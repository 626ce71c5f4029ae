// Tables are sorted by a click on a column's head: numbers by value ("8,820 (8,237 to 8,857)" is 8820), the rest as text.
(function () {
  function value(row, column) {
    const text = (row.cells[column]?.textContent ?? "").trim();
    const number = text.replace(/,(?=\d{3})/g, "").match(/^[^\d-]{0,2}(-?\d+(?:\.\d+)?)/);
    return { text, number: number ? parseFloat(number[1]) : NaN };
  }

  function sort(table, column, head) {
    const ascending = head.getAttribute("aria-sort") !== "ascending";
    table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const body = table.tBodies[0];
    const rows = Array.from(body.rows).map((row) => ({ row, key: value(row, column) }));
    rows.sort((a, b) => {
      const numeric = !isNaN(a.key.number) && !isNaN(b.key.number);
      const order = numeric ? a.key.number - b.key.number : a.key.text.localeCompare(b.key.text);
      return ascending ? order : -order;
    });
    body.append(...rows.map((entry) => entry.row));
  }

  document.addEventListener("click", (event) => {
    const head = event.target.closest(".md-typeset th");
    const table = head?.closest("table");
    if (head && table?.tBodies.length && table.tBodies[0].rows.length > 1) {
      sort(table, head.cellIndex, head);
    }
  });
})();
