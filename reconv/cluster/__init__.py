"""Several machines: submitted jobs, elastic runs, Ray, and checks of hosts."""
