// Large tables get a field that shows the rows with all of its words; blocks of long sentences wrap (site.css).
"use strict";
const ROWS_TO_SEARCH = 25;
const COLUMNS_OF_A_TABLE = 110;

for (const table of document.querySelectorAll(".md-content table:not([class])")) {
  const rows = [...table.rows].slice(1);
  if (rows.length < ROWS_TO_SEARCH) continue;
  const field = Object.assign(document.createElement("input"), { type: "search", className: "table-search" });
  field.placeholder = `Search ${rows.length} rows`;
  field.setAttribute("aria-label", field.placeholder);
  const texts = rows.map(row => row.textContent.toLowerCase());
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    rows.forEach((row, i) => { row.hidden = !words.every(word => texts[i].includes(word)); });
  });
  table.before(field);
}

// The output of programs is aligned in columns, which wrapping would break; it scrolls unless it has longer lines.
for (const block of document.querySelectorAll(".md-content .language-text pre")) {
  const longest = Math.max(...block.textContent.split("\n").map(line => line.length));
  block.classList.toggle("aligned", longest <= COLUMNS_OF_A_TABLE);
}

// Lines of commands break between flags, not at the hyphens in them.
for (const code of document.querySelectorAll(".md-content pre:not(.aligned) > code")) {
  const texts = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
  const nodes = [];
  while (texts.nextNode()) nodes.push(texts.currentNode);
  for (const node of nodes) {
    if (!/--\w/.test(node.data)) continue;
    node.replaceWith(...node.data.split(/(--\w[\w-]*)/).map(part => (
      part.startsWith("--") ? Object.assign(document.createElement("span"), { className: "flag", textContent: part }) : part
    )));
  }
}
