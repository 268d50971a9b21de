/* Filters the rows of the table behind an element with the class "filter", and makes what scrolls reachable by keyboard. */
document$.subscribe(() => {
  document.querySelector("[data-md-component=search]")?.setAttribute("aria-label", "Search"); // the theme's dialog has no name
  for (const place of document.querySelectorAll(".filter")) {
    let table = place.nextElementSibling;
    while (table && !table.querySelector("tbody")) table = table.nextElementSibling;
    if (!table || place.querySelector("input")) continue;
    const rows = [...table.querySelectorAll("tbody tr")];
    const label = document.createElement("label");
    label.textContent = place.dataset.label;
    const input = document.createElement("input");
    input.type = "search";
    input.placeholder = place.dataset.hint;
    const count = document.createElement("output");
    const show = () => {
      const words = input.value.toLowerCase().replaceAll("-", "_").split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const text = row.textContent.toLowerCase().replaceAll("-", "_");
        row.hidden = !words.every(word => text.includes(word));
        shown += !row.hidden;
      }
      count.textContent = `${shown} of ${rows.length} rows`;
    };
    input.addEventListener("input", show);
    label.append(input);
    place.append(label, count);
    show();
  }
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code, .md-typeset .highlight > pre, .md-typeset p:has(> img)")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
});
