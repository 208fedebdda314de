"""The HTML pages: a report of runs, and a plan. They need the extra ``thinwire[cli]`` (plotly)."""
