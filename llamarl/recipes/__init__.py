"""Recipes: functions RunConfig -> RunConfig, one file each. What a user set wins over what a recipe says."""
