"""How the page looks: colours, CSS, and the script that sorts tables."""

from __future__ import annotations

import base64
import hashlib

LIGHT_COLOURS = {
    "paper": "#ffffff", "card": "#f6f7f9", "ink": "#1b1f24", "muted": "#545d68", "rule": "#d5dae0",
    "good": "#0f5d27", "good-paper": "#e3f4e7", "bad": "#9a0c22", "bad-paper": "#fdeaec",
    "unknown": "#6e4400", "unknown-paper": "#fff3d9", "link": "#0a56a8",
    "s0": "#0067b0", "s1": "#c14a00", "s2": "#00785a", "s3": "#a8427f", "s4": "#8a6a00", "s5": "#5b4bb5",
    "s6": "#7c1d45", "s7": "#4c6a1f",
}  # fmt: skip
DARK_COLOURS = {
    "paper": "#14171b", "card": "#1d2228", "ink": "#e9ecef", "muted": "#a9b3bd", "rule": "#3a424b",
    "good": "#7fe0a2", "good-paper": "#12301d", "bad": "#ff9ca5", "bad-paper": "#3b161a",
    "unknown": "#f4c56c", "unknown-paper": "#33280f", "link": "#7cbcff",
    "s0": "#62b5ff", "s1": "#ff9a57", "s2": "#4fd0a6", "s3": "#f29ccd", "s4": "#e0c050", "s5": "#b3a6ff",
    "s6": "#ff8fae", "s7": "#b3d67e",
}  # fmt: skip

TEXT_ON_BACKGROUND = (
    ("ink", "paper"), ("ink", "card"), ("muted", "paper"), ("muted", "card"), ("good", "good-paper"),
    ("bad", "bad-paper"), ("unknown", "unknown-paper"), ("link", "paper"), ("link", "card"), ("good", "paper"),
    ("bad", "paper"), ("unknown", "paper"), ("good", "card"), ("bad", "card"), ("unknown", "card"),
    ("ink", "good-paper"), ("ink", "bad-paper"), ("ink", "unknown-paper"),
)  # fmt: skip
"""What is written on what."""


def _format_css_variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


CSS = (
    f"""
:root{{color-scheme:light dark;{_format_css_variables(LIGHT_COLOURS)}}}
@media (prefers-color-scheme:dark){{:root{{{_format_css_variables(DARK_COLOURS)}}}}}
@media print{{:root{{color-scheme:light;{_format_css_variables(LIGHT_COLOURS)}}}}}
"""
    + """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%;scroll-behavior:smooth}
@media (prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
body{margin:0;background:var(--paper);color:var(--ink);
 font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",sans-serif}
header,nav,main,footer{max-width:76rem;margin:0 auto;padding:0 1rem}
a{color:var(--link)}
h1{font-size:1.1rem;font-weight:600;margin:1.5rem 0 .75rem;color:var(--muted);overflow-wrap:anywhere}
h1 b{color:var(--ink)}
h2{font-size:1.35rem;line-height:1.25;margin:3rem 0 1rem;padding-top:1rem;border-top:1px solid var(--rule)}
h3{font-size:1rem;margin:0;overflow-wrap:anywhere}
p{max-width:65rem;overflow-wrap:anywhere}
.skip{position:absolute;left:-99rem}
.skip:focus{left:1rem;top:.5rem;background:var(--paper);padding:.5rem}
.banner{max-width:none;border-radius:.75rem;padding:1.25rem 1.5rem;display:flex;flex-wrap:wrap;gap:.25rem 1.5rem;
 align-items:baseline}
.banner strong{font-size:2.25rem;line-height:1.15;letter-spacing:.01em}
.banner span{font-size:1.15rem;color:var(--ink)}
.good{color:var(--good)}.bad{color:var(--bad)}.unknown{color:var(--unknown)}.muted{color:var(--muted)}
.banner.good,.chip.good{background:var(--good-paper)}
.banner.bad,.chip.bad{background:var(--bad-paper)}
.banner.unknown,.chip.unknown{background:var(--unknown-paper)}
.chip{display:inline-block;border-radius:1rem;padding:.05rem .6rem;font-size:.85rem;font-weight:600;white-space:nowrap}
.chip.muted{background:var(--card)}
.cards-grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,20rem),1fr));gap:1rem;margin:1rem 0;
 padding:0;list-style:none}
.case{background:var(--card);border-radius:.6rem;padding:.9rem 1.1rem;border-left:.3rem solid var(--muted);min-width:0}
.case.good{border-color:var(--good)}.case.bad{border-color:var(--bad)}.case.unknown{border-color:var(--unknown)}
.case,.case *{color:var(--ink)}.case .chip.good{color:var(--good)}.case .chip.bad{color:var(--bad)}
.case .chip.unknown{color:var(--unknown)}.case .said,.case dt{color:var(--muted)}
.case-head{display:flex;flex-wrap:wrap;justify-content:space-between;gap:.25rem .75rem;align-items:center}
.said{margin:.25rem 0 0;font-size:.9rem}
.case dl{margin:.6rem 0 0;font-size:.92rem}
.case dt{margin-top:.35rem;font-size:.85rem}
.case dd{margin:0;overflow-wrap:anywhere;font-variant-numeric:tabular-nums}
nav ul{display:flex;flex-wrap:wrap;gap:.25rem 1.1rem;padding:0;margin:1.25rem 0 0;list-style:none;font-size:.95rem}
.notes{padding-left:1.2rem}.notes li{overflow-wrap:anywhere;max-width:65rem}
.missing{background:var(--unknown-paper);color:var(--unknown);border-radius:.5rem;padding:.6rem .9rem}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,26rem),1fr));gap:1.25rem;margin:1rem 0}
figure{margin:0;background:var(--card);border-radius:.6rem;padding:1rem;min-width:0}
figcaption{font-weight:600;margin-bottom:.15rem;overflow-wrap:anywhere}
figure p{margin:.1rem 0 .6rem;font-size:.88rem;color:var(--muted)}
svg.plot{display:block;width:100%;height:auto;max-width:34rem}
svg.plot text{font-family:inherit}
.hits circle{fill:transparent;stroke:none}.hits circle:hover{stroke:var(--ink);stroke-width:1.5}
.key{display:flex;flex-wrap:wrap;gap:.15rem 1rem;list-style:none;padding:0;margin:.6rem 0 0;font-size:.9rem}
.key li{display:flex;gap:.4rem;align-items:center;min-width:0;overflow-wrap:anywhere}
.key svg{flex:none;width:1.75rem;height:.9rem}
details{margin:.6rem 0 0;font-size:.92rem}summary{cursor:pointer;color:var(--link)}
.scroll{overflow-x:auto;margin:1rem 0;border-radius:.5rem;
 background:linear-gradient(to right,var(--paper) 30%,transparent) 0 0/3rem 100% no-repeat local,
  linear-gradient(to left,var(--paper) 30%,transparent) 100% 0/3rem 100% no-repeat local,
  linear-gradient(to right,var(--muted),transparent) 0 0/.8rem 100% no-repeat scroll,
  linear-gradient(to left,var(--muted),transparent) 100% 0/.8rem 100% no-repeat scroll}
.scroll:focus-visible,summary:focus-visible,a:focus-visible,button:focus-visible{outline:2px solid var(--link);
 outline-offset:2px}
table{border-collapse:collapse;font-size:.92rem;font-variant-numeric:tabular-nums;width:100%}
caption{text-align:left;font-weight:600;padding:.35rem 0}
th,td{padding:.35rem .65rem;text-align:right;border-bottom:1px solid var(--rule);vertical-align:top}
th{font-weight:600;color:var(--muted);vertical-align:bottom}
 tbody th{color:var(--ink);font-weight:500;vertical-align:top}
th.left,td.left{text-align:left}
tbody th.left,td.left{max-width:26rem;overflow-wrap:break-word}
td.wide{min-width:16rem}
.beside{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:.75rem 1.25rem;
 margin:1.25rem 0}
.beside>*{min-width:0}.beside .scroll{margin:0}.beside .foot{margin-top:.5rem}.beside .plots{grid-template-columns:1fr}
.under{display:block;white-space:nowrap;color:var(--muted);font-size:.85em}
th button{all:unset;cursor:pointer;font:inherit;color:inherit}
th[aria-sort=ascending] button::after{content:" \\25B2"}th[aria-sort=descending] button::after{content:" \\25BC"}

.foot{font-size:.9rem;color:var(--muted);margin-top:-.5rem}
dl.facts{display:grid;grid-template-columns:minmax(7rem,max-content) 1fr;gap:.2rem 1.25rem;margin:1rem 0;
 background:var(--card);border-radius:.6rem;padding:1rem}
dl.facts dt{color:var(--muted);overflow-wrap:anywhere}dl.facts dd{margin:0;min-width:0;overflow-wrap:anywhere}
pre{background:var(--card);border-radius:.5rem;padding:.8rem 1rem;margin:.3rem 0 1rem;white-space:pre-wrap;
 overflow-wrap:anywhere;font:.9rem/1.45 ui-monospace,"DejaVu Sans Mono",monospace}
footer{color:var(--muted);font-size:.9rem;padding-top:2rem;padding-bottom:3rem}
@media (max-width:42rem){
 h2{margin-top:2.25rem}.banner{padding:1rem 1.1rem}.banner strong{font-size:1.8rem}figure{padding:.8rem .6rem}
 dl.facts{grid-template-columns:1fr}dl.facts dd{margin-bottom:.4rem}
 table.cards,table.cards tbody,table.cards tr,table.cards td,table.cards th,table.cards caption{display:block;
  width:100%}
 table.cards thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
 table.cards tr{background:var(--card);border-radius:.6rem;padding:.5rem .9rem;margin-bottom:.8rem}
 table.cards tbody th{text-align:left;font-weight:600;padding:.35rem 0;border-bottom:1px solid var(--rule)}
 table.cards td{display:flex;justify-content:space-between;gap:1rem;text-align:right;padding:.3rem 0;min-width:0}
 table.cards td:last-child{border-bottom:0}table.cards td.none{display:none}
 table.cards td::before{content:attr(data-label);color:var(--muted);text-align:left;flex:none;max-width:45%}
 table.cards td.wide{display:block;text-align:left}table.cards td.wide::before{display:block;max-width:none}
 table.cards td>span,table.cards tbody th{min-width:0;max-width:none;overflow-wrap:anywhere}
}
@media print{
 html{font-size:12px}body{font-size:1rem}header,main,footer{max-width:none;padding:0}nav,.skip{display:none}
 h2{break-after:avoid;margin-top:1.5rem}figure,.case,tr,pre{break-inside:avoid}
 .banner,.chip,.case,figure,.missing{print-color-adjust:exact;
  -webkit-print-color-adjust:exact}
 .scroll{overflow:visible;break-inside:auto;background:none}
 table{font-size:7.5pt}th,td{padding:.15rem .3rem}td.wide{min-width:7rem}
 table.many{font-size:6.5pt}table.many th,table.many td{padding:.1rem .2rem;min-width:0}
 .chip{padding:0 .35rem;font-size:inherit}
 .plots,.beside{grid-template-columns:1fr 1fr;gap:.6rem}tbody th.left,td.left{overflow-wrap:anywhere;max-width:12rem}
 details:not([open]){display:none}a{color:inherit;text-decoration:none}
}
"""
)

SCRIPT = """
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, place) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "sort";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = row => {
        const cell = row.cells[place];
        return cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v);
      };
      const compare = (a, b) => {
        if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
        return typeof a === "number" ? (a === b ? 0 : a - b) : a.localeCompare(b);
      };
      const rows = [...body.rows].sort((a, b) => (down ? -1 : 1) * compare(value(a), value(b)));
      body.append(...rows);
    });
  });
}
"""

SCRIPT_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
"""By which the page allows this script, and no other."""
