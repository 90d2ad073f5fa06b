"""How the report's page looks: by day, by night, and on paper."""

from normgrad.testing.svg import LIGHT, STYLE

_PAPER = (
    f"{LIGHT};--page:#f6f7f9;--pass:#127a4b;--pass-fill:#e3f6ec;--fail:#b42318;--fail-fill:#fdeaea;"
    "--doubt:#8a4b00;--doubt-fill:#fdf1dc;--link:#1f63a8;--small:#5d6675"
)
_DARK = (
    "--card:#1a2028;--text:#e6e9ee;--dim:#98a2b3;--line:#667085;--grid:#2b323d;--good:#5aa9f0;--bad:#ff6b6b;"
    "--other:#f0a63c;--page:#12161c;--pass:#5fd39a;--pass-fill:#16382a;--fail:#ff9d96;--fail-fill:#43191c;"
    "--doubt:#f3bd6a;--doubt-fill:#3d2c10;--link:#7cbcf5;--small:#a4aebd"
)

#: The colours of text and what is behind it, as the names of two of the page's variables.
TEXT_ON = (
    ("text", "page"),
    ("text", "card"),
    ("small", "page"),
    ("small", "card"),
    ("fail", "card"),
    ("link", "card"),
    ("pass", "pass-fill"),
    ("fail", "fail-fill"),
    ("doubt", "doubt-fill"),
)
THEMES = {"light": _PAPER, "dark": _DARK}

CSS = f"""
:root {{ color-scheme: light dark; {_PAPER}; }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK}; }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }}
main {{ max-width: 1320px; margin: 0 auto; padding: 32px 24px 64px; }}
h1 {{ font-size: 24px; margin: 0 0 4px; }}
h2, h3 {{ font-size: 17px; margin: 0; display: inline; }}
p {{ margin: 6px 0; }}
ul {{ margin: 6px 0 10px; padding-left: 20px; }}
a {{ color: var(--link); }}
code {{ overflow-wrap: anywhere; }}
summary {{ cursor: pointer; }}
.dim {{ color: var(--small); }}
.wrong {{ color: var(--fail); font-weight: 600; }}
.card {{ background: var(--card); border: 1px solid var(--grid); border-radius: 10px; }}
.card {{ padding: 18px 20px; margin: 16px 0; }}
.card > summary + div {{ margin-top: 14px; }}
.badge {{ display: inline-block; border-radius: 6px; padding: 1px 9px; margin-right: 8px; }}
.badge {{ font-weight: 600; font-size: 13px; white-space: nowrap; }}
.badge.pass {{ color: var(--pass); background: var(--pass-fill); }}
.badge.fail {{ color: var(--fail); background: var(--fail-fill); }}
.badge.not-judged {{ color: var(--doubt); background: var(--doubt-fill); }}
.plots {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(330px, 1fr)); gap: 12px; margin: 14px 0 4px; }}
.plots svg {{ width: 100%; height: auto; }}
.plots .tick, .plots .label {{ fill: var(--small); }}
.scroll {{ overflow-x: auto; }}
.out + .out {{ border-top: 1px solid var(--grid); margin-top: 18px; padding-top: 18px; }}
table {{ border-collapse: collapse; width: 100%; font-size: 13px; margin: 8px 0; }}
caption {{ text-align: left; font-weight: 600; padding: 8px 0 4px; }}
th, td {{ text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--grid); vertical-align: top; }}
th {{ color: var(--small); font-weight: 500; white-space: nowrap; }}
td {{ font-variant-numeric: tabular-nums; }}
.n {{ text-align: right; white-space: nowrap; }}
.chip {{ display: block; white-space: nowrap; }}
.chip b {{ font-weight: 500; color: var(--small); }}
{STYLE}
@media print {{
  :root {{ color-scheme: light; {_PAPER}; --page: #fff; }}
  @page {{ margin: 12mm; }}
  body {{ font-size: 10pt; }}
  main {{ max-width: none; padding: 0; }}
  .card {{ border: 0; padding: 0; }}
  .badge {{ border: 1px solid currentcolor; }}
  .plots {{ grid-template-columns: repeat(3, 1fr); gap: 6px; }}
  .scroll {{ overflow: visible; }}
  details::details-content {{ content-visibility: visible; display: block; }}
  h2, h3, caption {{ break-after: avoid; }}
  .plots, tr {{ break-inside: avoid; }}
  table {{ font-size: 7pt; }}
  th, td {{ padding-right: 6px; white-space: normal; overflow-wrap: break-word; }}
  .chip {{ white-space: normal; }}
  a {{ color: inherit; text-decoration: none; }}
}}
"""
