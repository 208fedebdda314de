"""What runs leave behind, and what can be made of it: events, the HTML report, TensorBoard."""
