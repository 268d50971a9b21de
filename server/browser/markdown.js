"use strict";
// Shows Markdown as nodes of the document: markdown(text) returns a fragment. Text of a model is only ever set as text, and no
// attribute is made of it but the address of a link, which must be http, https or mailto. Images become links. What is not
// closed yet, as while an answer streams, is shown as far as it goes. Nesting is bounded, and every search goes forward once.
const markdown = (() => {
  const MAX_DEPTH = 8;
  const SAFE = /^(?:https?:\/\/|mailto:)[^\s]+$/i;
  const PUNCTUATION = "\\`*_{}[]()#+-.!|~>";

  function make(tag, ...children) {
    const node = document.createElement(tag);
    node.append(...children);
    return node;
  }

  function link(label, address) {
    const node = make("a", label);
    node.href = address;
    node.target = "_blank";
    node.rel = "noopener noreferrer nofollow";
    return node;
  }

  // inline: code, emphasis, links. `missing` has the delimiters that are known to come no more, so that none is searched twice.
  function inline(text, depth = 0) {
    const fragment = document.createDocumentFragment(), missing = new Set();
    let plain = "", at = 0;
    const flush = () => { if (plain) fragment.append(plain); plain = ""; };
    const find = (mark, from) => {
      if (missing.has(mark)) return -1;
      const found = text.indexOf(mark, from);
      if (found < 0) missing.add(mark);
      return found;
    };
    const wrap = (tag, begin, end, length) => {
      flush();
      fragment.append(make(tag, inline(text.slice(begin, end), depth + 1)));
      at = end + length;
    };
    while (at < text.length) {
      const here = text[at];
      if (here === "\\" && at + 1 < text.length && PUNCTUATION.includes(text[at + 1])) {
        plain += text[at + 1];
        at += 2;
      } else if (here === "`") {
        let end = at;
        while (text[end] === "`") end++;
        const ticks = text.slice(at, end), close = find(ticks, end);
        if (close > end) {
          flush();
          fragment.append(make("code", text.slice(end, close).trim() || text.slice(end, close)));
          at = close + ticks.length;
        } else { plain += ticks; at = end; }
      } else if (depth < MAX_DEPTH && (text.startsWith("**", at) || text.startsWith("__", at) || text.startsWith("~~", at))) {
        const mark = text.slice(at, at + 2), close = find(mark, at + 2), opens = text[at + 2]?.trim();
        const inWord = here === "_" && /\w/.test(text[at - 1] ?? " ");
        if (close > at + 2 && opens && !inWord) wrap(here === "~" ? "del" : "strong", at + 2, close, 2);
        else { plain += mark; at += 2; }
      } else if (depth < MAX_DEPTH && (here === "*" || here === "_")) {
        const close = find(here, at + 1), opens = text[at + 1]?.trim(), inWord = here === "_" && /\w/.test(text[at - 1] ?? " ");
        const closes = close > at + 1 && text[close - 1].trim() && !(here === "_" && /\w/.test(text[close + 1] ?? " "));
        if (closes && opens && !inWord) wrap("em", at + 1, close, 1);
        else { plain += here; at++; }
      } else if (here === "[" || (here === "!" && text[at + 1] === "[")) {
        const open = here === "!" ? at + 1 : at, middle = find("](", open), close = middle < 0 ? -1 : find(")", middle);
        const address = close < 0 ? "" : text.slice(middle + 2, close).trim().split(/\s/)[0];
        if (SAFE.test(address)) {
          flush();
          fragment.append(link(text.slice(open + 1, middle) || address, address));
          at = close + 1;
        } else { plain += here; at++; }
      } else if ((here === "h" || here === "H") && /^https?:\/\//i.test(text.slice(at, at + 8)) && !/\w/.test(text[at - 1] ?? " ")) {
        let end = at;
        while (end < text.length && !/[\s<>"'`|]/.test(text[end])) end++;
        while (end > at && ".,;:!?)*_".includes(text[end - 1])) end--;
        const address = text.slice(at, end);
        if (SAFE.test(address)) { flush(); fragment.append(link(address, address)); at = end; }
        else { plain += here; at++; }
      } else if (here === "\n") {
        flush();
        fragment.append(make("br"));
        at++;
      } else { plain += here; at++; }
    }
    flush();
    return fragment;
  }

  const indentOf = line => line.length - line.trimStart().length;
  const item = line => /^ *(?:[-*+]|\d{1,9}[.)]) +(?=\S)/.exec(line);
  const fence = line => /^ {0,3}(```+|~~~+) *([^`\s]*)/.exec(line);
  const rule = line => /^ {0,3}([-*_])(?: *\1){2,} *$/.test(line);
  const heading = line => /^ {0,3}(#{1,6}) +(.*)$/.exec(line);
  const cells = line => line.trim().replace(/^\||\|$/g, "").split("|").map(cell => cell.trim());
  const dashes = line => line !== undefined && line.includes("-") && cells(line).every(cell => /^:?-+:?$/.test(cell));
  const begins = line => fence(line) || heading(line) || rule(line) || item(line) || line.trimStart().startsWith(">");

  // Answers begin with a heading of any rank. On the page the highest one stands below "Conversation", and none is left out.
  let ranks = [];
  function headingLevel(rank) {
    while (ranks.length && ranks.at(-1) >= rank) ranks.pop();
    ranks.push(rank);
    return Math.min(ranks.length + 2, 6);
  }

  function codeBlock(language, lines) {
    const code = make("code", lines.join("\n")), copy = make("button", "Copy"), head = make("div", make("span", language || "text"), copy);
    copy.type = "button";
    copy.dataset.copies = "code";
    copy.setAttribute("aria-label", `Copy the code (${language || "text"})`);
    head.className = "code-head";
    const pre = make("pre", code);
    pre.tabIndex = 0;
    pre.setAttribute("aria-label", `Code (${language || "text"})`);
    pre.setAttribute("role", "region");
    const block = make("div", head, pre);
    block.className = "code";
    return block;
  }

  function table(lines) {
    const width = cells(lines[0]).length;
    const row = (tag, line) => make("tr", ...cells(line).slice(0, width).map(cell => make(tag, inline(cell))));
    const body = make("tbody", ...lines.slice(2).map(line => row("td", line)));
    const box = make("div", make("table", make("thead", row("th", lines[0])), body));
    box.className = "table";
    box.tabIndex = 0;
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", "Table");
    return box;
  }

  function list(lines, depth) {
    const first = item(lines[0])[0], ordered = /\d/.test(first), node = make(ordered ? "ol" : "ul");
    if (ordered) node.start = Number.parseInt(first, 10);
    let own = [], width = first.length;
    const close = () => {
      if (!own.length) return;
      while (own.length && !own.at(-1).trim()) own.pop();
      node.append(make("li", own.length > 1 ? blocks(own, depth + 1) : inline(own[0] ?? "")));
      own = [];
    };
    const outer = indentOf(lines[0]);
    for (const line of lines) {
      const mark = item(line);
      if (mark && indentOf(line) <= outer + 1) {
        close();
        width = mark[0].length;
        own.push(line.slice(width));
      } else own.push(line.slice(Math.min(indentOf(line), width)));
    }
    close();
    return node;
  }

  function blocks(lines, depth) {
    const fragment = document.createDocumentFragment();
    if (depth > MAX_DEPTH) {
      fragment.append(lines.join("\n"));
      return fragment;
    }
    let at = 0;
    while (at < lines.length) {
      const line = lines[at], fenced = fence(line), title = heading(line);
      let end = at + 1;
      if (!line.trim()) { at++; continue; }
      if (fenced) {
        const mark = fenced[1];
        while (end < lines.length && !(lines[end].trim().startsWith(mark) && !lines[end].trim().replaceAll(mark[0], ""))) end++;
        fragment.append(codeBlock(fenced[2], lines.slice(at + 1, end)));
        at = end + 1;
      } else if (title) {
        fragment.append(make(`h${headingLevel(title[1].length)}`, inline(title[2].replace(/ #+ *$/, ""))));
        at++;
      } else if (rule(line)) {
        fragment.append(make("hr"));
        at++;
      } else if (line.trimStart().startsWith(">")) {
        while (end < lines.length && lines[end].trimStart().startsWith(">")) end++;
        fragment.append(make("blockquote", blocks(lines.slice(at, end).map(each => each.trimStart().replace(/^> ?/, "")), depth + 1)));
        at = end;
      } else if (item(line)) {
        const ordered = /^ *\d/.test(line);
        while (end < lines.length) {
          const next = lines[end], mark = item(next), inside = indentOf(next) > indentOf(line) + 1;
          if (mark && !inside && /^ *\d/.test(next) !== ordered) break;
          if (!mark && !inside && (next.trim() === "" ? !(lines[end + 1] && (item(lines[end + 1]) || indentOf(lines[end + 1]) > 1)) : begins(next) || !lines[end - 1].trim())) break;
          end++;
        }
        fragment.append(list(lines.slice(at, end), depth));
        at = end;
      } else if (line.includes("|") && dashes(lines[at + 1])) {
        end = at + 2;
        while (end < lines.length && lines[end].includes("|")) end++;
        fragment.append(table(lines.slice(at, end)));
        at = end;
      } else {
        while (end < lines.length && lines[end].trim() && !begins(lines[end]) && !(lines[end].includes("|") && dashes(lines[end + 1]))) end++;
        fragment.append(make("p", inline(lines.slice(at, end).map(each => each.trimEnd()).join("\n"))));
        at = end;
      }
    }
    return fragment;
  }

  return text => {
    ranks = [];
    return blocks(text.replaceAll("\r", "").replaceAll("\t", "    ").split("\n"), 0);
  };
})();
