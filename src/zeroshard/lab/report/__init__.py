"""`zeroshard report`: one HTML page that opens offline, and the same figures as PNGs.

    entries.py      run folders and sweeps -> entries, one for each configuration, and notices about problems
    figure.py       a figure as data: axes with their units, and marks
    figures.py      entries -> figures, or the reason why a figure is missing
    single_run.py   header and curves of a report of one run
    interactive.py  a figure in plotly's format
    png.py          the same figure drawn by matplotlib
    table.py        the table of results
    page.py         all of it in one HTML file, with page.html.j2, page.css and page.js
    send.py         runs -> a tracker
    command.py      the command, from folders to files

A figure is data before it is drawn, so the page and the PNGs cannot show different things.
"""
