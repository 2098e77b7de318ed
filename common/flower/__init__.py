"""All that touches Flower's programs and its non-public parts, so that another release is this room's work."""
