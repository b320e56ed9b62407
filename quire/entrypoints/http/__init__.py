"""What an HTTP server needs whatever it speaks: connections and bodies within their limits."""
