"""What the papers show beyond the library: networks, data sets, planners and parallelism. Imports `shoal`.

Not part of the package: run and imported from the project's root, such as
`shoal plan --model examples.networks.vgg:vgg19 --planner examples.planners.layerwise:layerwise`.
"""
