"""From results to pages. It reads run folders and starts nothing."""
