"""Object stores and web servers: listing, ranged reads of a known version, and uploads, with retries."""
