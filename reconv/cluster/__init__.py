"""Several machines: submitted jobs, elastic runs, and checks of hosts.."""
