"""Where KV-cache blocks go beside the device: host memory, a folder, a store that engines share."""
