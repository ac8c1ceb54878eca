# SPDX-License-Identifier: Apache-2.0
"""The style sheet of `explain`'s page."""

STYLE = """
:root { --ink: #1d2330; --dim: #667085; --paper: #ffffff; --panel: #f4f6fa; --line: #d9dee8;
  --good: #18794e; --plain: #3b5bdb; --bad: #b54708; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9f0; --dim: #98a2b3; --paper: #14171f; --panel: #1d222d;
  --line: #343b49; --good: #4cc38a; --plain: #8da2fb; --bad: #f5a524; } }
* { box-sizing: border-box; }
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.05rem; margin: 0; overflow-wrap: anywhere; }
a { color: var(--plain); overflow-wrap: anywhere; }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { background: var(--panel); padding: .6rem 0; margin: .3rem 0; border-radius: 6px; overflow-x: auto; }
pre span { display: block; padding: 0 .8rem; color: var(--dim); }
pre .here { color: var(--ink); background: color-mix(in srgb, var(--plain) 18%, transparent); }
pre i { color: var(--dim); font-style: normal; user-select: none; }
table { border-collapse: collapse; width: 100%; font-size: 14px; margin: 1rem 0; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
section { border: 1px solid var(--line); border-radius: 8px; padding: 1rem; margin: 1rem 0; }
details { margin: .4rem 0; }
summary { cursor: pointer; color: var(--plain); }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; }
.tile { border: 1px solid var(--line); border-radius: 8px; padding: .6rem 1rem; }
.tile b { font-size: 1.4rem; }
.tile small { display: block; color: var(--dim); }
.replaced b, .badge.replaced { color: var(--good); }
.kept b, .badge.kept { color: var(--plain); }
.missed b, .badge.missed { color: var(--bad); }
.badge { border: 1px solid; border-radius: 99px; padding: 0 .5rem; font-size: 12px; font-weight: 600; }
.where, .file, .work, .unknown { color: var(--dim); margin: .3rem 0; font-size: 13px; overflow-wrap: anywhere; }
.why, .fix { margin: .3rem 0; }
.why b { color: var(--bad); }
.fix b { color: var(--good); }
.row { display: grid; grid-template-columns: 7rem 1fr 7rem; gap: .6rem; align-items: center; margin: .2rem 0; }
.track { background: var(--panel); border-radius: 4px; }
.tile-bar, .inductor-bar { height: .8rem; border-radius: 4px; background: var(--good); }
.inductor-bar { background: var(--plain); }
"""
