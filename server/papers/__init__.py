"""The papers' tables, made again and judged, and the demo of their claims."""
