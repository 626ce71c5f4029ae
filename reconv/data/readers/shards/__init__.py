"""Files with many samples each: finding them, their index, and the bytes of the TFRecord and packed formats."""
