"""Published methods: each file names the boxes of one and starts from configs/base.py."""
