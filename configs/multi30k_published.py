"""The published Multi30k recipe with fairseq's early stopping, which the published runs used.

    transformer-jax sweep configs/multi30k_published.py --seeds 3 --data.folder FOLDER

With seeds 0, 1, and 2, models trained with this config reached 40.93, 40.28, and 40.90 BLEU after
7,360, 6,272, and 6,848 steps (see docs/your-own-data.md).

Training ends after 8,000 steps at the latest. It ends earlier if the loss on the development set,
which includes label smoothing, does not improve for 10 epochs. In configs/multi30k.py, which also
describes FOLDER, training ends if the perplexity does not improve for 10 epochs.

Four details of the published code remain different: its vocabulary has 10,000 merges of
subword-nmt (here: SentencePiece), its label smoothing divides eps by V - 1 (here: by V), its
feed-forward weights have fairseq's initial values (here: Glorot's), and its decoder starts with
the end-of-sentence token (here: a separate token).

Differs from the paper in the same ways as configs/multi30k.py.
"""

from configs.multi30k import CONFIG as MULTI30K

CONFIG = MULTI30K.change(train={"patience_metric": "smoothed_loss"})
