"""The page's look. Colours that the colour-blind can tell apart (after Okabe and Ito), dark enough, or light enough."""

CSS = """
:root {
  color-scheme: light dark;
  --back: #f6f7f9; --card: #ffffff; --text: #1b2130; --muted: #596275; --edge: #dfe3ea; --grid: #e8ebf0;
  --soft: #eef1f6;
  --c0: #0067a8; --c1: #c24a00; --c2: #007a59; --c3: #a83a74; --c4: #7a5c00; --c5: #4a4fb3; --c6: #27788f;
  --c7: #555b66;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #12151c; --card: #1a1f29; --text: #e6e9f0; --muted: #9fa9bc; --edge: #2d3442; --grid: #272e3b;
    --soft: #222936;
    --c0: #5cb6f2; --c1: #f08a4b; --c2: #35c79b; --c3: #e58cb8; --c4: #e6c84a; --c5: #a0a4f5; --c6: #73cbe0;
    --c7: #b9c0cd;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--back); color: var(--text); -webkit-text-size-adjust: 100%;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 56px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.015em; overflow-wrap: anywhere; }
h2 { font-size: 20px; line-height: 1.3; margin: 44px 0 12px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h3 { font-size: 16px; line-height: 1.3; margin: 0; }
p { margin: 0 0 10px; }
.lead { color: var(--muted); font-size: 17px; margin-bottom: 24px; overflow-wrap: anywhere; }
.muted, figcaption p, .note { color: var(--muted); font-size: 14px; }
.note { margin: 10px 0 0; max-width: 76ch; overflow-wrap: anywhere; }
.note + .charts { margin-top: 20px; }
.warn { border-left: 3px solid var(--c1); padding-left: 12px; color: var(--text); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(215px, 1fr)); gap: 14px; margin: 0; padding: 0; }
.cards > div, figure, .scroll, details.run {
  background: var(--card); border: 1px solid var(--edge); border-radius: 12px;
}
.cards > div { padding: 14px 18px 16px; }
.cards dt { color: var(--muted); font-size: 14px; }
.cards dd { margin: 0; overflow-wrap: anywhere; }
.cards .big { font-size: 27px; line-height: 1.25; font-weight: 650; letter-spacing: -0.02em; white-space: nowrap; }
.cards .small { color: var(--muted); font-size: 14px; }
.charts { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 18px; }
figure { margin: 0; padding: 16px 18px 12px; min-width: 0; }
figcaption p { margin: 2px 0 8px; }
figure > svg { display: block; width: 100%; height: auto; max-height: 420px; overflow: visible; }
svg text { font-size: 12px; fill: var(--muted); }
svg .name { fill: var(--muted); }
svg .value { fill: var(--text); font-weight: 600; stroke: var(--card); stroke-width: 3px; paint-order: stroke; }
.grid { stroke: var(--grid); stroke-width: 1; }
.base, .tick { stroke: var(--muted); stroke-width: 1; }
.l { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.bar { fill: currentColor; }
svg .inside { fill: var(--card); font-weight: 600; pointer-events: none; }
.hover { fill: transparent; stroke: none; }
circle.hover:hover { fill: currentColor; fill-opacity: 0.25; }
circle, polygon { fill: currentColor; stroke: var(--card); stroke-width: 1; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); } .c6 { color: var(--c6); } .c7 { color: var(--c7); }
.ideal { color: var(--muted); }
.legend {
  display: flex; flex-wrap: wrap; gap: 4px 16px; list-style: none; margin: 8px 0 2px; padding: 0; font-size: 14px;
}
.legend li { display: inline-flex; align-items: center; gap: 7px; overflow-wrap: anywhere; min-width: 0; }
.swatch { width: 28px; height: 14px; flex: none; vertical-align: -2px; }
details { font-size: 14px; }
summary { cursor: pointer; color: var(--muted); padding: 4px 0; }
summary:hover { color: var(--text); }
:focus-visible { outline: 2px solid var(--c0); outline-offset: 2px; border-radius: 4px; }
.scroll { overflow-x: auto; }
figure .scroll { border-radius: 8px; margin: 4px 0 6px; max-height: 300px; overflow-y: auto; }
table {
  border-collapse: separate; border-spacing: 0; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums;
}
th, td { padding: 6px 14px; text-align: right; vertical-align: top; }
td { min-width: 92px; max-width: 320px; overflow-wrap: anywhere; }
tr > :first-child { text-align: left; position: sticky; left: 0; background: var(--card); max-width: 190px; }
tbody th { font-weight: 400; color: var(--muted); }
thead th {
  font-weight: 650; border-bottom: 1px solid var(--edge); min-width: 110px; max-width: 320px;
  overflow-wrap: anywhere;
}
thead th.long { min-width: 160px; }
.tight td { white-space: nowrap; }
.tight thead th { overflow-wrap: break-word; min-width: 0; }
tbody tr + tr > * { border-top: 1px solid var(--grid); }
tbody tr.section > * { font-weight: 650; color: var(--text); padding-top: 16px; border-top: 1px solid var(--edge); }
tbody:first-of-type tr.section:first-child > * { border-top: 0; padding-top: 10px; }
details.run { padding: 8px 18px; margin-bottom: 10px; }
details.run > summary { color: var(--text); font-weight: 600; overflow-wrap: anywhere; }
pre {
  background: var(--soft); border-radius: 8px; padding: 10px 14px; margin: 8px 0 12px; font-size: 13px;
  line-height: 1.45;
  white-space: pre-wrap; overflow-wrap: anywhere; font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace;
}
.pairs { display: grid; grid-template-columns: repeat(auto-fill, minmax(230px, 1fr)); gap: 2px 24px; margin: 8px 0; }
.pairs div {
  display: flex; justify-content: space-between; gap: 12px; border-bottom: 1px solid var(--grid); padding: 3px 0;
}
.pairs dt { color: var(--muted); }
.pairs dd { margin: 0; text-align: right; overflow-wrap: anywhere; }
footer { margin-top: 40px; color: var(--muted); font-size: 13px; }
@media (max-width: 700px) {
  .charts { grid-template-columns: minmax(0, 1fr); }
}
@media (max-width: 560px) {
  main { padding: 24px 14px 40px; }
  h1 { font-size: 24px; }
  h2 { margin-top: 34px; }
  .cards { grid-template-columns: 1fr 1fr; gap: 10px; }
  .cards > div { padding: 11px 13px 12px; }
  .cards .big { font-size: 21px; }
  figure { padding: 13px 12px 10px; }
  svg text { font-size: 14px; }
  th, td { padding: 6px 10px; }
  .tight th, .tight td { padding: 6px 7px; min-width: 0; font-size: 13px; }
  tr > :first-child { max-width: 118px; }
  td, thead th { min-width: 86px; max-width: 190px; }
}
@media print {
  :root {
    color-scheme: light; --back: #fff; --card: #fff; --text: #000; --muted: #444; --edge: #bbb; --grid: #ddd;
    --soft: #f3f3f3;
    --c0: #0067a8; --c1: #c24a00; --c2: #007a59; --c3: #a83a74; --c4: #7a5c00; --c5: #4a4fb3; --c6: #27788f;
    --c7: #555b66;
  }
  main { max-width: none; padding: 0; }
  figure, .cards > div, tr, details { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  .charts { grid-template-columns: 1fr 1fr; }
  figure details { display: none; }
  .scroll { overflow: visible; }
}
""".strip()
