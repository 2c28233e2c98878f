PICTURE, draw = None, None
