"""`reconv tune`: a search over recipe fields whose trials are ordinary runs, continued bitwise from rung to rung."""
