"""How the report's page looks, by day and by night."""

from normgrad.testing.svg import LIGHT, STYLE

_DARK = "--text:#e6e9ee;--dim:#98a2b3;--line:#667085;--grid:#2b323d;--good:#5aa9f0;--bad:#ff6b6b;--other:#f0a63c"

CSS = f"""
:root {{ color-scheme: light dark; {LIGHT}; }}
:root {{ --page: #f6f7f9; --pass: #127a4b; --pass-fill: #e3f6ec; --bad-fill: #fdeaea; }}
@media (prefers-color-scheme: dark) {{
  :root {{ {_DARK}; --page: #12161c; --card: #1a2028; --pass: #5fd39a; --pass-fill: #16382a; --bad-fill: #43191c; }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }}
main {{ max-width: 1320px; margin: 0 auto; padding: 32px 24px 64px; }}
h1 {{ font-size: 24px; margin: 0 0 4px; }}
h2 {{ font-size: 17px; margin: 0; display: inline; }}
p {{ margin: 6px 0; }}
ul {{ margin: 6px 0 10px; padding-left: 20px; }}
summary {{ cursor: pointer; }}
.dim {{ color: var(--dim); }}
.wrong {{ color: var(--bad); font-weight: 600; }}
.card {{ background: var(--card); border: 1px solid var(--grid); border-radius: 10px; }}
.card {{ padding: 18px 20px; margin: 16px 0; }}
.card > summary + div {{ margin-top: 14px; }}
.badge {{ display: inline-block; border-radius: 6px; padding: 1px 9px; margin-right: 8px; }}
.badge {{ font-weight: 600; font-size: 13px; }}
.badge.pass {{ color: var(--pass); background: var(--pass-fill); }}
.badge.fail {{ color: var(--bad); background: var(--bad-fill); }}
.plots {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(330px, 1fr)); gap: 12px; margin: 14px 0 4px; }}
.plots svg {{ width: 100%; height: auto; }}
.scroll {{ overflow-x: auto; }}
.out + .out {{ border-top: 1px solid var(--grid); margin-top: 18px; padding-top: 18px; }}
table {{ border-collapse: collapse; width: 100%; font-size: 13px; margin: 8px 0; }}
caption {{ text-align: left; font-weight: 600; padding: 8px 0 4px; }}
th, td {{ text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--grid); vertical-align: top; }}
th {{ color: var(--dim); font-weight: 500; white-space: nowrap; }}
td {{ font-variant-numeric: tabular-nums; }}
.n {{ text-align: right; white-space: nowrap; }}
.chip {{ display: block; white-space: nowrap; }}
.chip b {{ font-weight: 500; color: var(--dim); }}
{STYLE}
"""
