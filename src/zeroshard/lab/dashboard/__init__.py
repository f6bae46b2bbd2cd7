"""`zeroshard dashboard`: a live page of the runs below a folder, and a planner with controls, on loopback.

watch.py     the runs below a folder, read again when their files have changed
live.py      their steps as figures
runs.py      the page of runs: state, curves, memory, plan against actual
run_page.py  the page of one run, and the settings in which runs differ
planner.py   the page that calls `zeroshard.lab.plan`
app.py       both in one Dash application
server.py    who may reach it, and how it ends
"""
