"""Images with boxes: COCO, Pascal VOC and YOLO layouts, TFRecords, and generated ones."""
