// Markdown of answers as elements. Text reaches the page as text nodes only, so that it is never markup.
"use strict";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = /(`+)(?!`)(.+?)(?<!`)\1(?!`)|\*\*(?=\S)(.+?)(?<=\S)\*\*|\*(?=[^\s*])(.+?)(?<=[^\s*])\*(?!\*)|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/s;
const DEEPEST = 8;

export function element(tag, content = [], properties = {}) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...(Array.isArray(content) ? content : [content]));
  return made;
}

/** Elements of `text`: headings, paragraphs, lists, quotes, tables, code. */
export function markdown(text, depth = 0) {
  if (depth > DEEPEST) return [element("p", text)];
  const lines = text.split("\n"), found = [];
  let at = 0;
  const paragraph = [];
  const endParagraph = () => {
    if (paragraph.length) found.push(element("p", inline(paragraph.splice(0).join("\n"))));
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line), heading = HEADING.exec(line);
    if (!line.trim()) {
      endParagraph();
      at += 1;
    } else if (fence) {
      endParagraph();
      const close = lines.findIndex((each, i) => i > at && each.trim().startsWith(fence[1]) && !each.trim().replaceAll(fence[1][0], ""));
      const end = close < 0 ? lines.length : close;
      found.push(element("pre", element("code", lines.slice(at + 1, end).join("\n"))));
      at = end + 1;
    } else if (heading) {
      endParagraph();
      found.push(element(`h${Math.min(heading[1].length + 1, 4)}`, inline(heading[2])));
      at += 1;
    } else if (RULE.test(line)) {
      endParagraph();
      found.push(element("hr"));
      at += 1;
    } else if (QUOTE.test(line)) {
      endParagraph();
      const [quoted, next] = block(lines, at, each => QUOTE.exec(each)?.[1]);
      found.push(element("blockquote", markdown(quoted.join("\n"), depth + 1)));
      at = next;
    } else if (ITEM.test(line)) {
      endParagraph();
      const [made, next] = list(lines, at, depth);
      found.push(made);
      at = next;
    } else if (line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "") && lines[at + 1].includes("|")) {
      endParagraph();
      const [rows, next] = block(lines, at, each => (each.includes("|") ? each : undefined));
      found.push(table(rows));
      at = next;
    } else {
      paragraph.push(line.trim());
      at += 1;
    }
  }
  endParagraph();
  return found;
}

/** Consecutive lines from `at` for which `read` returns a text, and the index after them. */
function block(lines, at, read) {
  const found = [];
  for (let text; at < lines.length && (text = read(lines[at])) !== undefined; at += 1) found.push(text);
  return [found, at];
}

/** The list whose first item is at `at`; deeper indented lines belong to an item. */
function list(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark), items = [];
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    const space = /^\s*/.exec(lines[at])[0].length;
    if (item && space <= indent.length + 1 && space >= indent.length && /\d/.test(item[2]) === ordered) {
      items.push([item[3]]);
    } else if (lines[at].trim() && space > indent.length + 1) {
      items.at(-1).push(lines[at].slice(Math.min(space, indent.length + mark.length + 1)));
    } else if (lines[at].trim() || !/^\s+\S/.test(lines[at + 1] ?? "") && !ITEM.test(lines[at + 1] ?? "")) {
      break;
    } else {
      items.at(-1).push("");
    }
    at += 1;
  }
  const made = items.map(item => {
    const parts = markdown(item.join("\n"), depth + 1);
    return element("li", parts.length && parts[0].tagName === "P" ? [...parts[0].childNodes, ...parts.slice(1)] : parts);
  });
  return [element(ordered ? "ol" : "ul", made, ordered ? { start: Number.parseInt(mark, 10) } : {}), at];
}

function table(rows) {
  const cells = row => row.trim().replace(/^\||\|$/g, "").split("|").map(each => inline(each.trim()));
  const line = (row, tag) => element("tr", cells(row).map(cell => element(tag, cell)));
  return element("table", [line(rows[0], "th"), ...rows.slice(2).map(row => line(row, "td"))]);
}

/** Nodes of one paragraph: code, strong, emphasis, and links to http and https. */
function inline(text) {
  const found = [];
  for (let match; (match = INLINE.exec(text)); text = text.slice(match.index + match[0].length)) {
    const [, , code, strong, emphasis, label, address] = match;
    found.push(text.slice(0, match.index));
    if (code !== undefined) found.push(element("code", code));
    else if (strong !== undefined) found.push(element("strong", inline(strong)));
    else if (emphasis !== undefined) found.push(element("em", inline(emphasis)));
    else found.push(element("a", label, { href: address, rel: "noopener noreferrer", target: "_blank" }));
  }
  return [...found, text];
}
