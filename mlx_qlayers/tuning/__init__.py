"""Search over launch configurations, on the user's own device, and what it found."""
