"""Where sequences are kept. `memory` holds them in this process."""
