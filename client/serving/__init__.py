"""Answers callers with a site's models (`perennial serve`). It trains nothing and speaks to no server."""
