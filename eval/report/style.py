"""Looks of the page: of its own fonts and colours, for wide and narrow screens, light and dark. Plots stay white."""

CSS = """
:root { color-scheme: light dark; --back: #fff; --card: #f5f6f8; --text: #1b1f24; --soft: #57606a; --line: #d0d7de;
  --link: #0550ae; --good: #1a6f37; --bad: #a40e26; --open: #7a4e00; }
@media (prefers-color-scheme: dark) { :root { --back: #14171b; --card: #1f242a; --text: #e6e9ec; --soft: #a3adb8;
  --line: #3a424b; --link: #79b8ff; --good: #6fdd8b; --bad: #ff8f8f; --open: #f0c36d; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--back); color: var(--text); font: 1rem/1.5
  system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; }
h2 { font-size: 1.3rem; margin: 0 0 .3rem; }
h3 { font-size: 1rem; margin: 1rem 0 .2rem; }
a { color: var(--link); }
a:focus-visible, summary:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
p, li, code { overflow-wrap: anywhere; }
p, ul, ol { max-width: 48rem; }
ul, ol { padding-left: 1.3rem; margin: .3rem 0; }
li { margin: .2rem 0; }
.answer { background: var(--card); border-left: .35rem solid var(--soft); padding: .6rem 1rem; }
.answer .headline { font-size: 1.2rem; font-weight: 600; margin: .2rem 0; }
.answer.yes { border-color: var(--good); }
.answer.no { border-color: var(--bad); }
.answer.open { border-color: var(--open); }
section.experiment { border-top: 1px solid var(--line); padding: 1.2rem 0; }
.question { color: var(--soft); margin: .2rem 0 .6rem; font-style: italic; }
.state { font-size: .85rem; padding: .1rem .5rem; border: 1px solid currentColor; border-radius: 1rem; white-space:
  nowrap; }
.state.done { color: var(--good); }
.state.failed, .state.running { color: var(--bad); }
.state.missing { color: var(--open); }
.flag { color: var(--bad); font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: .6rem; margin:
  .6rem 0; }
.plots figure { margin: 0; background: #fff; border: 1px solid var(--line); min-width: 0; overflow: hidden; }
pre { background: var(--card); padding: .5rem .7rem; overflow-x: auto; font-size: .85rem; }
.files { padding: 0; list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1rem; }
table { border-collapse: collapse; font-size: .85rem; }
th, td { text-align: left; padding: .15rem .6rem .15rem 0; vertical-align: top; overflow-wrap: anywhere; }
th { font-weight: 600; white-space: nowrap; }
details { margin: .4rem 0; }
summary { cursor: pointer; color: var(--soft); }
nav .state { margin-left: .4rem; }
footer { border-top: 1px solid var(--line); color: var(--soft); padding: 1rem 0; }
@media print { .plots figure { break-inside: avoid; } nav, details { display: none; } }
"""
