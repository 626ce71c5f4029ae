"""Image decoders: Pillow, simplejpeg and the compiled JPEG decoder."""
