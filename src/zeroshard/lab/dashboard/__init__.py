"""`zeroshard dashboard`: a live page of the runs below a folder, and a planner with controls, on loopback.

watch.py          finds the runs below a folder, and reads each again when its files have changed
step_curves.py    figures of their steps
all_runs_page.py  the page of all runs: state, curves, memory, plan against actual
run_page.py       the page of one run, and the table of settings in which runs differ
planner.py        the page that calls `zeroshard.lab.plan`
app.py            all pages in one Dash application
server.py         the HTTP server: access control, headers, shutdown
"""
