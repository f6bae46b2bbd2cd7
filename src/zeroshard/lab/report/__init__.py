"""`zeroshard report`: one page that opens offline, and the same figures as PNGs.

    entries.py      run folders and sweeps -> entries, one for each configuration, and what is wrong with any of them
    figure.py       a figure as data: axes with their units, and marks
    figures.py      entries -> figures, or why there is none
    reading_notes.py how many runs are behind a figure, and which of its lines lie on each other
    rank_spans.py   a trace -> what each rank did when
    interactive.py  a figure as plotly has it
    png.py          the same as matplotlib draws it
    table.py        the table of results
    page.py         all of it in one HTML file, with page.html.j2, page.css and page.js
    command.py      from settings to files

Figures are data first, so that the page, the PNGs and the dashboard cannot tell different things.
"""
