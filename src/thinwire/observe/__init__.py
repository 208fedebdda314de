"""What runs leave behind and what is made of it: events, summaries, TensorBoard, HTML pages."""
