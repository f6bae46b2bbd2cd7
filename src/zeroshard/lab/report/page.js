const read = id => JSON.parse(document.getElementById(id).textContent);
const config = read("config"), drawings = read("drawings");
const root = document.documentElement, button = document.getElementById("theme");
const preferred = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 520px)");
let remembered = null, drawn = false;
try { remembered = localStorage.getItem("zeroshard-theme"); } catch (error) { console.info("the theme is not remembered here"); }

const isDark = () => remembered ? remembered === "dark" : preferred.matches;

// Black marks and white text have to be seen on either ground; the other colours are seen on both.
const recoloured = value => JSON.parse(JSON.stringify(value), (key, each) => each === "#000000" ? "#f2f2f2" : each);

function layoutOf(drawing, index) {
  const layout = JSON.parse(JSON.stringify(drawing.layout));
  const [ink, paper, grid] = isDark() ? ["#e8e8e8", "#16181c", "#3a3e46"] : ["#1a1a1a", "white", "#e3e3e3"];
  Object.assign(layout, {paper_bgcolor: paper, plot_bgcolor: paper});
  layout.font = {...layout.font, color: ink, size: narrow.matches ? 11 : layout.font.size};
  for (const axis of [layout.xaxis, layout.yaxis]) Object.assign(axis, {gridcolor: grid, linecolor: ink});
  const log = document.querySelector(`[data-log="${index}"]`);
  if (log && log.checked) layout.yaxis = {...layout.yaxis, type: "log", rangemode: undefined};
  return layout;
}

// An exponential moving average that does not begin at 0, as Adam's corrected one.
function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map(value => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

function dataOf(drawing, index) {
  const slider = document.querySelector(`[data-smooth="${index}"]`), weight = slider ? Number(slider.value) : 0;
  const data = isDark() ? recoloured(drawing.data) : drawing.data;
  return weight ? data.map(line => line.mode === "lines" && !line.opacity ? {...line, y: smoothed(line.y, weight)} : line) : data;
}

// The page's columns say how wide a figure is, and its drawing how high. plotly.js's own `responsive` asks the element
// for both, and an element without a height of its own becomes 0 high.
function draw(index) {
  const element = document.getElementById("figure-" + index);
  element.style.height = drawings[index].layout.height + "px";
  const layout = {...layoutOf(drawings[index], index), width: element.clientWidth};
  Plotly.react(element, dataOf(drawings[index], index), layout, config);
}
const resized = new ResizeObserver(entries => {
  for (const {target} of entries)
    if (target.layout?.width !== target.clientWidth) draw(Number(target.id.slice("figure-".length)));
});

function show() {
  root.classList.toggle("dark", isDark());
  button.textContent = isDark() ? "Light" : "Dark";
  button.setAttribute("aria-pressed", String(isDark()));
  button.setAttribute("aria-label", isDark() ? "Change to light colours" : "Change to dark colours");
  if (drawn) drawings.forEach((drawing, index) => draw(index));
}

button.addEventListener("click", () => {
  remembered = isDark() ? "light" : "dark";
  try { localStorage.setItem("zeroshard-theme", remembered); } catch (error) { console.info("the theme is not remembered here"); }
  show();
});
preferred.addEventListener("change", show);
narrow.addEventListener("change", show);
document.querySelectorAll("[data-smooth], [data-log]").forEach(control =>
  control.addEventListener("input", () => drawn && draw(Number(control.dataset.smooth ?? control.dataset.log))));
show();

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

if (typeof DecompressionStream === "undefined") {
  document.getElementById("no-figures").hidden = false;
} else {
  inflate(document.getElementById("plotly").textContent).then(source => {
    const script = document.createElement("script");
    script.textContent = source;
    document.head.append(script);
    drawn = true;
    show();
    drawings.forEach((drawing, index) => resized.observe(document.getElementById("figure-" + index)));
  });
}