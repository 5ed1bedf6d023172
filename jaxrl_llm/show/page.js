"use strict";
// What a policy wrote reaches the page through textContent alone.
const { runs, curves, groups } = JSON.parse(document.getElementById("data").textContent);
const PER_PAGE = 25;
const form = document.getElementById("filters"), rows = document.getElementById("rows"), tip = document.getElementById("tip");
const COLORS = {
  advantages: { label: "advantage", diverging: true },
  ratios: { label: "probability ratio, after the update", diverging: true, center: 1 },
  entropies: { label: "entropy, nats" }, logprobs: { label: "log-probability", reversed: true },
};
let page = 0;

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = String(text).replace(HIDDEN, spelled);
  if (className) made.className = className;
  return made;
}
const show = (value) => value === null || value === undefined ? "NaN" : String(+(+value).toPrecision(4));
const mean = (values) => values.reduce((a, b) => a + b, 0) / Math.max(values.length, 1);
const rewardOf = (row) => row.reward === null ? -Infinity : row.reward;

// Characters that draw nothing are spelled out: controls, formats (which turn the direction of writing, or hide a text in tags),
// lone surrogates, private and unassigned ones, line separators, fillers and variation selectors.
const HIDDEN = /(?![\n\t])[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}]/gu;
function spelled(character) {
  const code = character.codePointAt(0).toString(16);
  return code.length > 4 ? `\\u{${code}}` : "\\u" + code.padStart(4, "0");
}
function appendText(parent, text) {
  let from = 0;
  for (const hit of text.matchAll(HIDDEN)) {
    parent.append(text.slice(from, hit.index), element("span", spelled(hit[0]), "escaped"));
    from = hit.index + hit[0].length;
  }
  parent.append(text.slice(from));
}

// ---- curves: values under the pointer
for (const svg of document.querySelectorAll("svg[data-metric]")) {
  const { metric, x0, x1, left, right } = svg.dataset, cursor = svg.querySelector(".cursor");
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const at = Math.min(+right, Math.max(+left, (event.clientX - box.left) * scale));
    const step = +x0 + (at - left) / (right - left) * (x1 - x0);
    const lines = curves[metric].flatMap((line, run) => {
      if (!line) return [];
      const near = line.x.reduce((best, x, i) => Math.abs(x - step) < Math.abs(line.x[best] - step) ? i : best, 0);
      return [`${runs[run].name}  step ${line.x[near]}: ${line.y[near]}`];
    });
    cursor.setAttribute("transform", `translate(${at} 0)`);
    cursor.setAttribute("visibility", "visible");
    showTip(event, lines.join("\n"));
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); });
}
function showTip(event, text) {
  tip.textContent = text.replace(HIDDEN, spelled);
  tip.hidden = false;
  const wide = document.documentElement.clientWidth;
  tip.style.left = Math.min(event.pageX + 14, Math.max(0, wide - tip.offsetWidth - 8)) + "px";
  tip.style.top = event.pageY + 14 + "px";
}

// ---- samples: filters
function fill(name, options) {
  for (const [value, label] of options) {
    const option = element("option", label);
    option.value = value;
    form.elements[name].append(option);
  }
}
const numbers = (values) => [...new Set(values)].sort((a, b) => a - b).map((value) => [value, value]);
fill("run", [["", "all"], ...runs.map((run, i) => [i, run.name])]);
fill("step", [["", "all"], ...numbers(groups.map((group) => group.step))]);
const stops = [...new Set(groups.flatMap((g) => g.rows.map((row) => row.stop)))].sort();
fill("stop", [["", "anything"], ...stops.map((stop) => [stop, stop])]);
const recorded = Object.keys(COLORS).filter((name) => groups.some((g) => g.rows.some((row) => row[name])));
const noColor = recorded.length ? "none" : "not recorded in these runs";
fill("color", [["", noColor], ...recorded.map((name) => [name, COLORS[name].label])]);
const parts = [...new Set(groups.flatMap((g) => g.rows.flatMap((row) => Object.keys(row.parts))))];
const [lowest, highest] = groups.flatMap((g) => g.rows.map(rewardOf))
  .reduce(([low, high], reward) => [Math.min(low, reward), Math.max(high, reward)], [Infinity, -Infinity]);

function chosen() {
  const { run, step, kind, stop, sort, color, text } = Object.fromEntries(new FormData(form)), words = text.toLowerCase();
  const found = groups.filter((group) => {
    const rewards = group.rows.map(rewardOf);
    return (run === "" || group.run === +run) && (step === "" || group.step === +step)
      && (color === "" || group.rows.some((row) => row[color]))
      && (stop === "" || group.rows.some((row) => row.stop === stop))
      && (kind === "" || (kind === "mixed" ? new Set(rewards).size > 1
        : rewards.every((reward) => reward === (kind === "best" ? highest : lowest))))
      && (words === "" || [group.prompt, String(group.answer), ...group.rows.map((row) => row.text)]
        .some((part) => part.toLowerCase().includes(words)));
  });
  const keys = { high: (g) => -mean(g.rows.map(rewardOf)), low: (g) => mean(g.rows.map(rewardOf)),
    long: (g) => -Math.max(...g.rows.map((row) => row.length)) };
  return sort ? found.map((g) => [keys[sort](g), g]).sort((a, b) => a[0] - b[0]).map((pair) => pair[1]) : found;
}

// ---- samples: colors. Orange is low or negative, blue high or positive; the strongest tint is the largest size on this page.
function scaleOf(shown, name) {
  const { center = 0 } = COLORS[name];
  const values = shown.flatMap((g) => g.rows.flatMap((row) => row[name] || [])).filter((v) => v !== null);
  return values.reduce((most, v) => Math.max(most, Math.abs(v - center)), 0) || 1;
}
function tint(value, name, most) {
  const { diverging, center = 0 } = COLORS[name];
  if (value === null) return "#ff00ff88";
  const share = Math.min(1, Math.abs(value - center) / most);
  const [r, g, b] = diverging && value < center ? [213, 94, 0] : diverging ? [0, 114, 178] : [204, 121, 167];
  return `rgba(${r}, ${g}, ${b}, ${(0.75 * share).toFixed(3)})`;
}
function drawScale(name, most) {
  const place = document.getElementById("scale");
  place.replaceChildren();
  if (!name) return;
  const { diverging, center = 0, label, reversed } = COLORS[name];
  place.append(label + " ");
  for (const share of diverging ? [-1, -0.5, 0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1]) {
    const value = center + (reversed ? -1 : 1) * share * most, box = element("span", show(value));
    box.style.background = tint(value, name, most);
    place.append(box);
  }
}

// A conversation by its messages: who speaks, what the turn earned, and calls of tools in a frame. The policy's own are in ink,
// what others wrote is grey.
const CALL = /(<tool_call>[^]*?<\/tool_call>|```[^]*?```|<\|python_tag\|>[^]*|^\s*\{[^]*\}\s*$)/;
function conversation(messages) {
  const text = element("div", undefined, "text talk folded");
  for (const { role, content, reward } of messages) {
    const own = role === "assistant", block = element("div", undefined, own ? "message" : "message masked");
    const earned = reward === undefined ? "" : `  reward of the turn: ${show(reward)}`;
    block.append(element("div", role + earned, "role"));
    content.split(CALL).forEach((part, i) => {
      const span = element("span", undefined, own && i % 2 ? "call" : undefined);
      appendText(span, part);
      block.append(span);
    });
    text.append(block);
  }
  return text;
}

function completion(row, name, most) {
  const cell = element("td"), talk = row.messages && !name;
  const text = talk ? conversation(row.messages) : element("div", undefined, "text folded");
  if (row.tokens && !talk) {
    row.tokens.forEach((token, t) => {
      const trained = !row.trained || row.trained[t], span = element("span", undefined, trained ? undefined : "masked");
      appendText(span, token);
      if (trained && name && row[name]) span.style.background = tint(row[name][t], name, most);
      const facts = Object.keys(COLORS).filter((key) => row[key]).map((key) => `${COLORS[key].label}: ${show(row[key][t])}`);
      span.addEventListener("pointermove", (event) => showTip(event, [`token ${t + 1}`, ...(trained ? facts : ["not trained"])].join("\n")));
      span.addEventListener("pointerleave", () => { tip.hidden = true; });
      text.append(span);
    });
  } else if (!talk) appendText(text, row.text);
  text.addEventListener("click", () => text.classList.toggle("folded"));
  cell.append(text);
  return cell;
}

function draw() {
  const found = chosen(), pages = Math.max(1, Math.ceil(found.length / PER_PAGE));
  page = Math.min(Math.max(page, 0), pages - 1);
  const shown = found.slice(page * PER_PAGE, (page + 1) * PER_PAGE), name = form.elements.color.value;
  const most = name ? scaleOf(shown, name) : 1;
  drawScale(name, most);
  document.getElementById("count").textContent = `${found.length} of ${groups.length} groups`;
  document.getElementById("where").textContent = `page ${page + 1} of ${pages}`;
  document.getElementById("previous").disabled = page === 0;
  document.getElementById("next").disabled = page === pages - 1;
  const head = element("tr");
  for (const title of ["reward", ...parts, "tokens", "ended by", "completion"]) head.append(element("th", title));
  rows.replaceChildren(head);
  for (const group of shown) {
    const line = element("tr", undefined, "prompt"), cell = element("td");
    const swatch = element("span", "", "swatch"), text = element("div", "", "text folded");
    const average = show(mean(group.rows.map((row) => row.reward)));
    cell.colSpan = parts.length + 4;
    swatch.style.background = runs[group.run].color;
    appendText(text, group.prompt);
    text.addEventListener("click", () => text.classList.toggle("folded"));
    cell.append(swatch, element("span", `${runs[group.run].name}  step ${group.step}  answer: `));
    appendText(cell, String(group.answer));
    cell.append(`  mean reward: ${average}`, text);
    line.append(cell);
    rows.append(line);
    for (const row of group.rows) {
      const tr = element("tr");
      for (const value of [row.reward, ...parts.map((part) => row.parts[part])]) {
        tr.append(element("td", value === undefined ? "" : show(value), "number"));
      }
      tr.append(element("td", row.length, "number"), element("td", row.stop), completion(row, name, most));
      rows.append(tr);
    }
  }
}
// The view is part of the address, page.html#samples?color=entropies&step=40, so that it can be bookmarked and sent.
const given = new URLSearchParams(location.hash.split("?")[1] || "");
for (const [name, value] of given) {
  const field = form.elements.namedItem(name);
  if (field && (!field.options || [...field.options].some((option) => option.value === value))) field.value = value;
}
if (given.size) document.getElementById("samples").scrollIntoView();
form.addEventListener("input", () => {
  const view = [...new FormData(form)].filter(([, value]) => value !== "");
  history.replaceState(null, "", view.length ? `#samples?${new URLSearchParams(view)}` : "#samples");
  page = 0;
  draw();
});
form.addEventListener("submit", (event) => event.preventDefault());
document.getElementById("previous").addEventListener("click", () => { page -= 1; draw(); });
document.getElementById("next").addEventListener("click", () => { page += 1; draw(); });
draw();
