"use strict";
// Texts of runs and models reach the page through `textContent` alone: they are shown, never parsed as markup.
const page = JSON.parse(document.getElementById("data").textContent);
const runs = page.runs, byId = (id) => document.getElementById(id);
const RUN_COLORS = ["#3b7dd8", "#e07b28", "#2f9e58", "#b459c4", "#d64550", "#7a7f87"];

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "background") element.style.background = value;
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

// Letters that draw nothing, or change how others are drawn, are shown by their names.
function shown(text, keepsLines = true) {
  return String(text).replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, (letter) => {
    if (letter === "\n") return keepsLines ? "\n" : "↵";
    if (letter === "\t") return keepsLines ? "\t" : "⇥";
    const code = letter.codePointAt(0);
    return code < 32 ? String.fromCodePoint(0x2400 + code) : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

function short(text, length) {
  const plain = shown(text, false);
  return plain.length > length ? plain.slice(0, length) + "…" : plain;
}

function number(value, digits = 4) {
  if (value == null || !isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toPrecision(digits - 1) + "G";
  if (size >= 1e6) return (value / 1e6).toPrecision(digits - 1) + "M";
  if (size >= 1e5) return (value / 1e3).toPrecision(digits - 1) + "k";
  return size && size < 1e-3 ? value.toExponential(1) : String(+value.toPrecision(digits));
}

// Of an axis: with as many digits as tell neighbors apart.
function labels(ticks) {
  const gap = Math.abs(ticks[1] - ticks[0]), top = Math.max(...ticks.map(Math.abs));
  const digits = gap ? Math.max(4, Math.ceil(Math.log10(top / gap)) + 1) : 4;
  return ticks.map((tick) => number(tick, digits));
}

function seconds(value) {
  if (value == null || !isFinite(value)) return "–";
  const sign = value < 0 ? "-" : "", size = Math.abs(value);
  if (size < 0.1) return `${sign}${+(size * 1000).toPrecision(3)} ms`;
  if (size < 60) return `${sign}${+size.toPrecision(3)} s`;
  if (size < 3600) return `${sign}${Math.floor(size / 60)}m ${Math.round(size % 60)}s`;
  return `${sign}${Math.floor(size / 3600)}h ${Math.round((size % 3600) / 60)}m`;
}

function theme(name) { return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(); }

// As a line of that color and those dashes is drawn.
function stroke(color, dash) {
  let at = 0;
  const parts = dash.map((size, index) => `${index % 2 ? "transparent" : color} ${at}px ${at += size}px`);
  return parts.length ? `repeating-linear-gradient(90deg, ${parts.join(", ")})` : color;
}

const entry = (color, ...texts) => make("span", { class: "entry" }, make("span", { class: "swatch", background: color }), ...texts);

function table(head, rows) {
  return make("table", {}, make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col", text })))), make("tbody", {}, ...rows));
}

function row(cells, attributes) {
  return make("tr", attributes || {}, ...cells.map((cell) => cell instanceof Node ? make("td", {}, cell)
    : make("td", { class: typeof cell === "number" ? "number" : null, text: typeof cell === "number" ? number(cell) : cell })));
}

// A canvas in the pixels of the screen.
function sharp(canvas, height) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = "12px system-ui, sans-serif";
  return [context, width];
}

async function ask(path, values) {
  const answer = await fetch(page.live + path + "?" + new URLSearchParams(values));
  if (!answer.ok) throw new Error(`the page's server answers ${answer.status}`);
  return answer.json();
}
