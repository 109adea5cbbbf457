"""The gRPC server: handlers that translate and delegate, and what starts and stops them."""
