"use strict";
// Texts of runs and models reach the page only through `textContent`: they are shown, never parsed as markup.
const page = JSON.parse(document.getElementById("data").textContent);
const runs = page.runs, byId = (id) => document.getElementById(id);
const RUN_COLORS = ["#3b7dd8", "#e07b28", "#2f9e58", "#b459c4", "#0f97a8", "#7a7f87"];
const STATES = { finished: "good", failed: "bad", silent: "bad", empty: "bad", interrupted: "advice" };

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

// Characters that draw nothing, or change how others are drawn, are shown by their names.
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

const sentence = (text) => text && text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
const counted = (many, noun) => `${many.toLocaleString("en")} ${noun}${many === 1 ? "" : "s"}`;

function number(value, digits = 4) {
  if (value == null || !isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toPrecision(digits - 1) + "G";
  if (size >= 1e6) return (value / 1e6).toPrecision(digits - 1) + "M";
  if (size >= 1e5) return (value / 1e3).toPrecision(digits - 1) + "k";
  if (size >= 1e4) return (+value.toPrecision(digits)).toLocaleString("en");
  return size && size < 1e-3 ? value.toExponential(1) : String(+value.toPrecision(digits));
}

// At most seven characters.
const brief = (value) => value && Math.abs(value) < 0.01 ? value.toExponential(1) : number(value, 3);

function bytes(value, digits = 3) {
  if (value == null || !isFinite(value)) return "–";
  const power = Math.min(Math.max(Math.floor(Math.log10(Math.abs(value) || 1) / 3), 0), 4);
  return `${+(value / 1000 ** power).toPrecision(digits)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

// Digits that tell neighbors on an axis apart.
function labels(ticks) {
  const gap = Math.abs(ticks[1] - ticks[0]), top = Math.max(...ticks.map(Math.abs));
  const digits = gap ? Math.max(4, Math.ceil(Math.log10(top / gap)) + 1) : 4;
  return ticks.map((tick) => number(tick, digits));
}

function seconds(value) {
  if (value == null || !isFinite(value)) return "–";
  const sign = value < 0 ? "-" : "", size = Math.abs(value);
  if (!size) return "0 s";
  if (size < 0.1) return `${sign}${+(size * 1000).toPrecision(3)} ms`;
  if (size < 60) return `${sign}${+size.toPrecision(3)} s`;
  if (size < 3600) return `${sign}${Math.floor(size / 60)}m ${Math.round(size % 60)}s`;
  return `${sign}${Math.floor(size / 3600)}h ${Math.round((size % 3600) / 60)}m`;
}

function theme(name) { return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(); }

// The background of a swatch that looks like a line of that color and those dashes.
function stroke(color, dash) {
  let at = 0;
  const parts = dash.map((size, index) => `${index % 2 ? "transparent" : color} ${at}px ${at += size}px`);
  return parts.length ? `repeating-linear-gradient(90deg, ${parts.join(", ")})` : color;
}

const swatch = (color) => make("span", { class: "swatch", background: color });
const entry = (color, ...texts) => make("span", { class: "entry" }, swatch(color), ...texts);
const empty = (title, text, ...more) => make("div", { class: "empty" }, make("b", { text: title }), make("div", { text }), ...more);

// On narrow screens each row becomes a card, with the heads of the columns before the values.
function table(head, rows) {
  rows.forEach((line) => [...line.children].forEach((cell, index) => cell.setAttribute("data-label", head[index] || "")));
  return make("table", { class: "cards" }, make("thead", {}, make("tr", {}, ...head.map((text, index) => make("th", { scope: "col", class: rows[0]?.children[index]?.className || null, text })))), make("tbody", {}, ...rows));
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
  context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  return [context, width];
}

async function ask(path, values) {
  const answer = await fetch(page.live + path + "?" + new URLSearchParams(values));
  if (!answer.ok) throw new Error(`the page's server answers ${answer.status}`);
  return answer.json();
}

function download(name, blob) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// The address keeps what a reader has chosen: `#CHART?log=kl&hide=solve/train`. Sets are lists with commas.
const chosen = { target: "", values: new Map() };

function readAddress() {
  const [target, query] = location.hash.slice(1).split("?");
  chosen.target = target || "";
  if (query !== undefined) chosen.values = new Map(new URLSearchParams(query));
}

function keep(name, value) {
  if (value === "" || value == null) chosen.values.delete(name);
  else chosen.values.set(name, String(value));
  const query = new URLSearchParams([...chosen.values]).toString();
  history.replaceState(null, "", "#" + chosen.target + (query && "?" + query));
}

const setOf = (name) => new Set((chosen.values.get(name) || "").split(",").filter(Boolean).map(decodeURIComponent));

function flip(name, item) {
  const items = setOf(name);
  if (!items.delete(item)) items.add(item);
  keep(name, [...items].map(encodeURIComponent).join(","));
  return items.has(item);
}
readAddress();
