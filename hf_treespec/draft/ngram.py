from hf_treespec.tree import TokenTree
class NgramDraft:
    name = "ngram"
    def __init__(self, *, growth="best_first"): pass
    def propose(self, rows, limits): return [TokenTree.root_only(r.tokens[-1]) for r in rows]
    def commit(self, paths): return None
