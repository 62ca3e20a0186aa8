"""What the paper left out: recipes with a figure each, for `rankone icl experiment`.

minima     the local minima of GD++ with two layers
transfer   trained models on prompts unlike those of training
real_data  trained models on rows of data sets
run        one of them, from its name to its files
"""
