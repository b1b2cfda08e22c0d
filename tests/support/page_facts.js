// Runs in a page that holds the pages of a test as JSON: shows each at each width, and writes what a reader sees.
const given = JSON.parse(document.getElementById('given').textContent);
const rgba = text => {
  const numbers = text.match(/[\d.]+(e-?\d+)?/g).map(Number), scale = text.startsWith('color(') ? 255 : 1;
  return [...numbers.slice(0, 3).map(n => n * scale), numbers[3] ?? 1];
};
const over = (top, below) => top.slice(0, 3).map((value, i) => value * top[3] + below[i] * (1 - top[3]));
const luminance = color => {
  const [r, g, b] = color.map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (element, view) => {
  const color = rgba(view.getComputedStyle(element).backgroundColor);
  return color[3] === 1 || !element.parentElement ? color : over(color, ground(element.parentElement, view)).concat(1);
};
const contrast = (element, view) => {
  const style = view.getComputedStyle(element), below = ground(element, view);
  const text = over(rgba(element.closest('svg') ? style.fill : style.color), below);
  const [dark, light] = [luminance(text), luminance(below.slice(0, 3))].sort((a, b) => a - b);
  return (light + 0.05) / (dark + 0.05);
};
const seen = page => {
  const { document: shown } = page.contentWindow, view = page.contentWindow, all = [...shown.querySelectorAll('body *')];
  const texts = all.filter(e => !['SCRIPT', 'STYLE'].includes(e.tagName) && e.checkVisibility()
    && [...e.childNodes].some(node => node.nodeType === 3 && node.data.trim()));
  const faint = texts.map(e => [contrast(e, view), e.textContent.trim().slice(0, 60)]).filter(([c]) => c < given.contrast);
  const alone = [...shown.querySelectorAll('.panels')].flatMap(panels => {
    const rows = Object.groupBy(panels.children, e => e.getBoundingClientRect().top);
    return Object.values(rows).filter(row => row.length === 1 && row[0].offsetWidth < 0.9 * panels.offsetWidth);
  }).map(([panel]) => panel.textContent.slice(0, 40));
  const { scrollWidth, clientWidth } = shown.documentElement;
  const bottoms = Object.fromEntries(given.selectors.map(s => [s, shown.querySelector(s)?.getBoundingClientRect().bottom]));
  return { sideways: scrollWidth - clientWidth, faint, alone, bottoms, heading: shown.querySelector('h1')?.textContent,
    texts: texts.length };
};
const found = {};
for (const [name, text] of Object.entries(given.pages)) for (const width of given.widths) {
  const page = document.createElement('iframe');
  page.style = `width: ${width}px; height: 900px; border: 0`;
  document.body.append(page);
  page.contentDocument.write(text);
  page.contentDocument.close();
  found[`${name} ${width}`] = seen(page);
  page.remove();
}
const out = document.createElement('pre');
out.id = 'found';
out.textContent = JSON.stringify(found);
document.body.append(out);
