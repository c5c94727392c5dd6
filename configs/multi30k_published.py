"""The published Multi30k recipe with fairseq's early stopping, which the published runs used.

    transformer-jax sweep configs/multi30k_published.py --seeds 3 --data.folder FOLDER

Training ends after 8,000 steps at the latest. It ends earlier if the loss on the development set,
which includes label smoothing, does not improve for 10 epochs. In configs/multi30k.py, which also
describes FOLDER, training ends if the perplexity does not improve for 10 epochs.

Differs from the paper in the same ways as configs/multi30k.py.
"""

from configs.multi30k import CONFIG as MULTI30K

CONFIG = MULTI30K.change(train={"patience_metric": "smoothed_loss"})
