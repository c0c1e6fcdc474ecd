"""One self-contained HTML page about a run, or about several beside each other. Imports no torch.

`reading` turns a run directory into values, `charts` turns numbers into drawings, the other modules
make one part of the page each, and `page` puts it together and writes it.
"""
