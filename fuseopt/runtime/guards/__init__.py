"""Did the tensors of a call, or the lanes of an optimizer, change?"""
